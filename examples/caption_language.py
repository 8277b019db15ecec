"""A language of eight sentences, learned whole: the smallest decoder-only language model that can be seen through.

    python examples/caption_language.py

"a photo of a SIZE SHAPE" or "a SIZE SHAPE in the photo": style, size and shape are three flips of a coin, everything
else follows. So a perfect model pays 3 ln 2 nats a sentence of 7 predicted tokens (6 words and <eos>), 0.2971 a token;
none can do better, unless it sees what it is to predict.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from counting_positions import recompute, with_cache
from torch import Tensor

from leftward import Config, Decoder, LanguageModel, Tokenizer, preset
from leftward.data.batches import IGNORED
from leftward.training.loss import loss_sum

SIZES, SHAPES = ("large", "small"), ("plus", "circle")
GRAMMAR = 3 * math.log(2) / 7  # its entropy
MAX_LEN = 9  # <bos>, six words, <eos>, and one place of padding to leave out of the loss


def caption(style: int, size: str, shape: str) -> str:
    return f"a photo of a {size} {shape}" if style == 0 else f"a {size} {shape} in the photo"


SENTENCES = [caption(*choices) for choices in itertools.product((0, 1), SIZES, SHAPES)]
TOKENIZER = Tokenizer.train(SENTENCES, kind="word", special_tokens=("<bos>", "<eos>", "<pad>"), byte_fallback=False)
BOS, EOS, PAD = TOKENIZER.special_ids


def draw_captions(n: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [caption(rng.integers(0, 2), rng.choice(SIZES), rng.choice(SHAPES)) for _ in range(n)]


def as_tokens(captions: list[str]) -> Tensor:
    """[N, MAX_LEN]: <bos> … <eos>, padded on the right."""
    rows = [[*TOKENIZER.encode(text, add_bos=True), EOS] for text in captions]
    return torch.tensor([row + [PAD] * (MAX_LEN - len(row)) for row in rows])


CAPTIONS = draw_captions(800)
TRAIN, TEST = CAPTIONS[:680], CAPTIONS[680:]  # 85 %

CONFIG = preset(
    "gpt2",
    vocab_size=TOKENIZER.vocab_size,
    max_seq_len=MAX_LEN,
    n_layers=1,
    d_model=32,
    n_heads=4,
    block="post",
    feed_forward="gelu",
    tie_embeddings=False,
    head_bias=True,
    dropout=0.0,
)
WITHOUT_MASK = replace(CONFIG, causal=False)


def loss_of(logits_of: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Nats a token. Teacher forcing: each next token from the true ones before it; padding doesn't count."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    targets = targets.masked_fill(targets == PAD, IGNORED)
    return loss_sum(logits_of(inputs), targets) / (targets != IGNORED).sum()


def train(config: Config = CONFIG, steps: int = 800, seed: int = 0) -> tuple[LanguageModel, list[float]]:
    """The model and the loss of every step."""
    torch.manual_seed(seed)
    decoder = Decoder(config)
    adam = torch.optim.Adam(decoder.parameters(), lr=0.003, fused=True)
    tokens, losses = as_tokens(TRAIN), []
    for step in range(steps):
        loss = loss_of(decoder, tokens[np.random.default_rng(step).permutation(len(tokens))[:128]])
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return LanguageModel(decoder, TOKENIZER, eos_ids=[EOS]), losses


@torch.inference_mode()
def loss_in_use(model: LanguageModel, captions: list[str]) -> float:
    """The same loss as it is when a model writes: each token predicted where none comes after it yet."""
    tokens = as_tokens(captions)
    nats = 0.0
    for n in range(1, 8):
        logits = model.decoder(tokens[:, :n])[:, -1:]
        nats += loss_sum(logits, tokens[:, n : n + 1]).item()
    return nats / (7 * len(captions))


def entropy(captions: list[str]) -> float:
    """Of a caption drawn from these, in nats a token: on them, no model that looks only leftward has a lower loss."""
    shares = [count / len(captions) for count in Counter(captions).values()]
    return -sum(share * math.log(share) for share in shares) / 7


def agreement(model: LanguageModel) -> float:
    """The share of greedy tokens that are the same with a cache and recomputed, in 20 rows that begin with <bos>."""
    begin = torch.full((20, 1), BOS)
    cached, recomputed = (loop(model.decoder, begin, MAX_LEN - 1) for loop in (with_cache, recompute))
    return (cached == recomputed).float().mean().item()


def greedy(model: LanguageModel, prompt: str = "") -> str:
    """The most likely sentence that begins with `prompt`."""
    return prompt + model.generate(prompt, temperature=0)


class Samples(NamedTuple):
    texts: list[str]
    valid: float
    """The share that are sentences of the language."""
    seen: int
    """How many of its eight sentences there are among them."""
    most_frequent: float


def sample(model: LanguageModel, temperature: float, n: int = 20, seed: int = 5) -> Samples:
    texts = model.generate("", n=n, temperature=temperature, top_p=1.0, seed=seed)
    counts = Counter(texts)
    valid = sum(counts[sentence] for sentence in SENTENCES)
    return Samples(texts, valid / n, len(set(texts) & set(SENTENCES)), max(counts.values()) / n)


def main() -> None:
    model, losses = train()
    print(model)
    print(f"entropy of the grammar        {GRAMMAR:.4f} nats a token; of the captions drawn {entropy(TRAIN):.4f}")
    print(f"training loss, last batch     {losses[-1]:.4f}")
    print(f"loss in use, held out         {loss_in_use(model, TEST):.4f}")
    print(f"cached = recomputed           {agreement(model):.4f}")

    print("\nthe most likely sentence, by how it begins")
    for prompt in ("", "a photo", "a small", "a large"):
        print(f"  {prompt!r:9} → {greedy(model, prompt)}")
    samples = sample(model, 0.8)
    print(
        f"20 samples at temperature 0.8: {samples.valid * 20:.0f} valid, {samples.seen} of 8 sentences; the first six"
    )
    for text in samples.texts[:6]:
        print(f"  {text}")

    print("\nexercise 1: drop the mask and train again, with three seeds; 200 samples each at 0.8")
    print("                 training loss   loss in use     valid   sentences seen")
    trained = [("causal", model, losses)]
    trained += [("without mask", *train(WITHOUT_MASK, seed=seed)) for seed in range(3)]
    for name, other, its_losses in trained:
        samples = sample(other, 0.8, 200)
        print(f"  {name:14} {its_losses[-1]:13.4f} {loss_in_use(other, TEST):13.4f}", end="")
        print(f" {samples.valid:9.1%} {samples.seen:11} of 8")

    print("\nexercise 2: the temperature, 200 samples each")
    for temperature in (0.03, 0.3, 0.8, 2.0, 3.0):
        samples = sample(model, temperature, 200)
        print(f"  {temperature:4}: {samples.valid:6.1%} valid, the most frequent text {samples.most_frequent:.1%}")
    print("\nexercise 3, how the cache's gain grows with length and batch: cache_speed.py")


if __name__ == "__main__":
    main()
