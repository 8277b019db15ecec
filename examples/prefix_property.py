"""A decoder looks only leftward: the output at position t depends on tokens 1 … t, exactly.

    python examples/prefix_property.py

Run (the, cat, sat, down), then its first three tokens alone, and compare the rows that both have. This is why a model
that is trained on whole sequences can be used one token at a time.

A product of 3 rows may add up in another order than one of 4, so that in fp32 the last digit can differ. Computed in
fp64 and compared as fp32, nothing does. And with another last token instead of none, the shapes stay the same: then
fp32 too is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leftward import Config, Decoder
from leftward.model.attention import Attention
from leftward.model.masks import Mask

WORDS = ("the", "cat", "sat", "down")


class Changes(NamedTuple):
    """The largest change anywhere in the first three rows of the output."""

    dropped: float
    """(the, cat, sat) instead of (the, cat, sat, down), computed in fp64, compared as fp32."""
    dropped_fp32: float
    replaced_fp32: float
    """(the, cat, sat, the) instead."""


def config(**settings: object) -> Config:
    return Config.from_dict({"vocab_size": len(WORDS), "max_seq_len": 8, "d_model": 16, "n_heads": 2, **settings})


def attention_alone(*, causal: bool, seed: int = 0) -> Changes:
    attention = Attention(config(qk_norm="none"), layer=0)
    vectors = torch.randn(1, len(WORDS), 16, generator=torch.Generator().manual_seed(seed))  # one a word
    return changes(attention, lambda x: attention(x, [mask_of(x.shape[1], causal=causal)]), vectors, seed)


def whole_model(n_layers: int, *, causal: bool, seed: int = 0, **settings: object) -> Changes:
    """From ids to logits: layer k + 1 at position t only reads layer k at positions up to t."""
    decoder = Decoder(config(n_layers=n_layers, causal=causal, **settings)).eval()
    return changes(decoder, decoder, torch.arange(len(WORDS))[None], seed)


@torch.no_grad()
def changes(module: nn.Module, run: Callable[[Tensor], Tensor], words: Tensor, seed: int) -> Changes:
    draw_weights(module, seed)
    replaced = torch.cat((words[:, :3], words[:, :1]), dim=1)

    def largest(a: Tensor, b: Tensor) -> float:
        return (a[:, :3].float() - b[:, :3].float()).abs().max().item()

    whole, short, other = run(words), run(words[:, :3]), run(replaced)
    module.double()
    precise = words.double() if words.is_floating_point() else words
    return Changes(largest(run(precise), run(precise[:, :3])), largest(whole, short), largest(whole, other))


def draw_weights(module: nn.Module, seed: int) -> None:
    """Our fresh blocks add nothing yet (their last matrices start at 0): give every weight a say."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)


def mask_of(length: int, *, causal: bool) -> Mask:
    """The rules for a sequence whose queries and keys are the same places."""
    places = torch.arange(length)[None]
    return Mask(queries=places, keys=places, causal=causal)


def as_floats(mask: Mask) -> Tensor:
    """The mask in PyTorch's form, [T, T]: 0 where a key is seen, −∞ where it isn't."""
    everything = slice(0, mask.keys.shape[1])
    visible = mask.visible(everything, everything)[0, 0]
    return torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)


def main() -> None:
    mask = as_floats(mask_of(4, causal=True))
    print(mask)
    same = torch.equal(mask, nn.Transformer.generate_square_subsequent_mask(4))
    print(f"PyTorch's generate_square_subsequent_mask(4) is the same: {same}\n")
    print("largest change of the first three rows   with the causal mask            without")
    print("when the last token is                   dropped  (fp32)  replaced       dropped")
    for name, of in {
        "attention alone": attention_alone,
        "a model of 1 layer": lambda causal: whole_model(1, causal=causal),
        "a model of 4 layers": lambda causal: whole_model(4, causal=causal),
        "a model of 16 layers": lambda causal: whole_model(16, causal=causal),
    }.items():
        kept, lost = of(causal=True), of(causal=False)
        print(f"{name:40} {kept.dropped:.0e}   {kept.dropped_fp32:.0e}   {kept.replaced_fp32:.0e} {lost.dropped:15.2f}")


if __name__ == "__main__":
    main()
