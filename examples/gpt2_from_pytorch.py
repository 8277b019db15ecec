"""GPT-2 is PyTorch's encoder layer with a causal mask, and it is one Config of our Decoder: the same function.

    python examples/gpt2_from_pytorch.py

"Encoder" and "decoder" differ in PyTorch by cross-attention, not by masking. A decoder-only model has no encoder to
attend to, so what its block needs is exactly an encoder layer, run with a causal mask.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from leftward import Config, Decoder, preset

# The same names for both builds: (vocab, context, d, layers, heads).
TINY = (100, 32, 48, 3, 4)
SMALL = (50257, 1024, 768, 12, 12)


class GPT(nn.Module):
    """Assembled from PyTorch's own layers."""

    def __init__(self, vocab: int, context: int, d: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(context, d)
        block = nn.TransformerEncoderLayer(
            d, heads, dim_feedforward=4 * d, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tok.weight  # weight tying
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:  # [B, T] → [B, T, vocab]
        places = torch.arange(ids.shape[1])
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.blocks(self.tok(ids) + self.pos(places), mask=mask, is_causal=True)
        return self.head(x)


def gpt2(vocab: int, context: int, d: int, layers: int, heads: int) -> Config:
    """The same architecture as a Config. (OpenAI's own weights want feed_forward="gelu_tanh".)"""
    return preset(
        "gpt2", vocab_size=vocab, max_seq_len=context, d_model=d, n_layers=layers, n_heads=heads, feed_forward="gelu"
    )


# PyTorch's names → ours; the tensors have the same layout.
RENAMED = {
    "tok.": "embed.",
    "pos.": "position_embed.",
    "blocks.layers.": "blocks.",
    "blocks.norm.": "norm.",
    "self_attn.in_proj_": "attn.qkv.",
    "self_attn.out_proj.": "attn.o.",
    "norm1.": "attn_norm.",
    "norm2.": "ff_norm.",
    "linear1.": "ff.up.",
    "linear2.": "ff.down.",
}


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """PyTorch's state_dict under our names."""

    def ours(name: str) -> str:
        for theirs, new in RENAMED.items():
            name = name.replace(theirs, new)
        return name

    return {ours(name): tensor for name, tensor in weights.items()}


@torch.no_grad()
def largest_difference(seed: int = 0) -> float:
    """Between the logits of the two, with the same random weights."""
    torch.manual_seed(seed)
    theirs, ours = GPT(*TINY).eval(), Decoder(gpt2(*TINY)).eval()
    for parameter in theirs.parameters():  # PyTorch starts biases at 0: give every weight a say
        parameter.add_(torch.randn_like(parameter) * 0.1)
    ours.load_state_dict(renamed(theirs.state_dict()))
    ids = torch.randint(TINY[0], (4, TINY[1]))
    return (theirs(ids) - ours(ids)).abs().max().item()


def parameters() -> dict[str, int]:
    """Of GPT-2 small. On the meta device tensors have shapes and no memory."""
    with torch.device("meta"):
        tied, untied = Decoder(gpt2(*SMALL)), Decoder(replace(gpt2(*SMALL), tie_embeddings=False))
        pytorch = sum(parameter.numel() for parameter in GPT(*SMALL).parameters())
    return {"tied": tied.n_parameters, "untied": untied.n_parameters, "pytorch": pytorch}


def beyond_the_context() -> str:
    """What we answer to one token more than the table of positions has rows."""
    decoder = Decoder(gpt2(10, 1024, 8, 1, 2)).eval()
    try:
        decoder(torch.zeros(1, 1025, dtype=torch.long))
    except ValueError as error:
        return str(error)
    raise AssertionError("position 1024 has no row")


def main() -> None:
    print(f"largest difference of the logits, same weights, fp32:  {largest_difference():.1e}")
    counts = parameters()
    head = counts["untied"] - counts["tied"]
    print(f"parameters of GPT-2 small, tied:                       {counts['tied']:,} (PyTorch: {counts['pytorch']:,})")
    print(f"  a head of its own would add:                         {head:,} = {head / counts['untied']:.1%} of untied")
    fresh = Decoder(gpt2(*SMALL[:3], layers=1, heads=12))
    print(f"std of fresh token and position embeddings:            {fresh.embed.weight.std():.4f}", end=" ")
    print(f"{fresh.position_embed.weight.std():.4f}")
    print(f"1,025 tokens:                                          {beyond_the_context()}")


if __name__ == "__main__":
    main()
