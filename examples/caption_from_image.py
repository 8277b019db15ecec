"""A picture in front of the words: a decoder that captions what it sees, with no cross-attention anywhere.

    python examples/caption_from_image.py

As in LLaVA (Liu et al. 2023, arXiv 2304.08485): the picture is cut into patches, a linear projector makes each a vector
of the model's width, and these stand in front of the caption's tokens in one sequence. The decoder needs no change: it
is ordinary self-attention over two kinds of tokens. Projector and decoder are trained together.

Size and shape can be seen, and the style (the two ways to say it, in caption_language.py) is still a coin's flip: so
the best loss is ln 2 nats for the 7 predicted tokens of a caption, 0.0990 a token.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from caption_language import BOS, CONFIG, EOS, MAX_LEN, SHAPES, SIZES, TOKENIZER, as_tokens, caption, loss_of
from torch import Tensor, nn
from torch.nn import functional as F

from leftward import Decoder
from leftward.model.cache import KVCache

CANVAS, PATCH = 6, 2
N_PATCHES = (CANVAS // PATCH) ** 2  # 9, of 4 numbers each
BEST_LOSS = math.log(2) / 7


def draw(size: str, shape: str, rng: np.random.Generator) -> np.ndarray:
    """[6, 6]: a plus or a circle of 5 or 3 points' width, somewhere, in noise."""
    width = 5 if size == "large" else 3
    y, x = np.mgrid[:width, :width] - width // 2
    radius = np.hypot(x, y)
    figure = (x == 0) | (y == 0) if shape == "plus" else (radius >= width // 2) & (radius < width // 2 + 0.5)
    picture = rng.normal(0.0, 0.1, (CANVAS, CANVAS))
    top, left = rng.integers(0, CANVAS - width + 1, 2)
    picture[top : top + width, left : left + width] += figure
    return picture


def as_patches(pictures: np.ndarray) -> Tensor:
    """[N, 6, 6] → [N, 9, 4], row by row."""
    images = torch.from_numpy(pictures).float()[:, None]
    return F.unfold(images, PATCH, stride=PATCH).transpose(1, 2)


def examples(n: int, seed: int) -> tuple[Tensor, list[tuple[str, str]], list[str]]:
    """Patches [N, 9, 4], what each picture shows, and a caption of it in a style drawn at random."""
    rng = np.random.default_rng(seed)
    shown = [(str(rng.choice(SIZES)), str(rng.choice(SHAPES))) for _ in range(n)]
    pictures = np.stack([draw(*what, rng) for what in shown])
    return as_patches(pictures), shown, [caption(rng.integers(0, 2), *what) for what in shown]


class Captioner(nn.Module):
    """A projector before a decoder."""

    def __init__(self, *, prefix_lm: bool = False) -> None:
        super().__init__()
        self.projector = nn.Linear(PATCH * PATCH, CONFIG.d_model)
        self.decoder = Decoder(replace(CONFIG, n_layers=2, max_seq_len=N_PATCHES + MAX_LEN, block="pre"))
        self.prefix_lm = prefix_lm
        """Whether the patches see each other whatever their order. Otherwise each sees those before it only."""

    def forward(self, patches: Tensor, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits of what follows each token: [B, T, V]."""
        prefix_lengths = [N_PATCHES] * len(ids) if self.prefix_lm else None
        picture = self.projector(patches)  # [B, 9, D]
        logits = self.decoder(ids, cache, prefix_embeddings=picture, prefix_lengths=prefix_lengths)
        return logits[:, N_PATCHES:]

    def loss(self, patches: Tensor, tokens: Tensor) -> Tensor:
        """Nats a token of the caption."""
        return loss_of(lambda inputs: self(patches, inputs), tokens)

    @torch.inference_mode()
    def captions(self, patches: Tensor) -> list[str]:
        """Greedy. The picture is read once, then the cache remembers it."""
        cache = KVCache(self.decoder.config, len(patches), N_PATCHES + MAX_LEN)
        ids = torch.full((len(patches), 1), BOS)
        logits = self(patches, ids, cache)[:, -1]
        for _ in range(MAX_LEN - 2):
            ids = torch.cat((ids, logits.argmax(dim=-1, keepdim=True)), dim=1)
            logits = self.decoder(ids[:, -1:], cache)[:, -1]
        return [TOKENIZER.decode(row[: row.index(EOS)] if EOS in row else row) for row in ids.tolist()]


def train(*, prefix_lm: bool = False, steps: int = 400, seed: int = 0) -> tuple[Captioner, list[float]]:
    """The model and the loss of every step."""
    torch.manual_seed(seed)
    model = Captioner(prefix_lm=prefix_lm)
    adam = torch.optim.Adam(model.parameters(), lr=0.003, fused=True)
    patches, _, captions = examples(1600, seed)
    tokens, losses = as_tokens(captions), []
    for _ in range(steps):
        batch = torch.randint(len(tokens), (64,))
        loss = model.loss(patches[batch], tokens[batch])
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return model.eval(), losses


def accuracy(model: Captioner, n: int = 400, seed: int = 99) -> dict[str, float]:
    """Of greedy captions of pictures that were not trained on."""
    patches, shown, _ = examples(n, seed)
    captions = model.captions(patches)
    pairs = list(zip(captions, shown, strict=True))
    return {
        "size": sum(size in text.split() for text, (size, _) in pairs) / n,
        "shape": sum(shape in text.split() for text, (_, shape) in pairs) / n,
        "sentence": sum(text in (caption(0, *what), caption(1, *what)) for text, what in pairs) / n,
    }


def main() -> None:
    model, losses = train()
    rng = np.random.default_rng(3)
    pictures = np.stack([draw(size, shape, rng) for size in SIZES for shape in SHAPES])
    for row in range(CANVAS):
        print("     ".join(" ".join("·#"[int(value > 0.5)] for value in picture[row]) for picture in pictures))
    for text in model.captions(as_patches(pictures)):
        print(f"  {text}")
    print(f"\nbest possible loss {BEST_LOSS:.4f} nats a token")
    print(f"{'400 new pictures':22} last losses     size    shape   whole caption")
    for name, (trained, its_losses) in {
        "causal": (model, losses),
        "patches see each other": train(prefix_lm=True),
    }.items():
        right = accuracy(trained)
        print(f"{name:22} {sum(its_losses[-20:]) / 20:11.4f} {right['size']:8.1%} {right['shape']:8.1%}", end="")
        print(f" {right['sentence']:15.1%}")


if __name__ == "__main__":
    main()
