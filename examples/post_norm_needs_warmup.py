"""Post-norm needs a warm-up where pre-norm does not (Xiong et al. 2020, arXiv 2002.04745): measured on real text.

    python examples/post_norm_needs_warmup.py [--data FILE] [--plot FILE]

First their theorem, at initialisation: in the last layer, the gradient of the feed-forward's second matrix has about
the same norm however deep a post-norm model is, and falls like 1/√depth in a pre-norm one. Steps of full size along
such gradients ruin a post-norm model in its first moments; then what that does: a small model of characters, trained
with Adam, with and without a warm-up, at several learning rates.

leftward's own fresh blocks add nothing to the stream (their last matrices start at zero): another remedy, which would
mix with what is to be measured. So the weights here are drawn as the paper does: Xavier.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import torch
from pictures import add_plot_option
from torch import Tensor, nn

from leftward import Decoder, Tokenizer, preset
from leftward.data.sources import BUILTIN, Report, find, read
from leftward.errors import UserError
from leftward.training.loss import loss_sum

Norms = Literal["pre", "post"]
Text = tuple[Tensor, int]  # ids of all characters, and how many different ones there are

D_MODEL, BATCH, SEQ_LEN = 64, 8, 32


def load_characters(path: str = BUILTIN) -> Text:
    report = Report()
    text = "".join(piece.text for piece in read(find([path], report), report))
    tokenizer = Tokenizer.train([text], kind="char", special_tokens=())
    return torch.from_numpy(tokenizer.encode_batch([text])[0].astype("int64")), tokenizer.vocab_size


def draw_batch(text: Text, generator: torch.Generator) -> Tensor:  # [BATCH, SEQ_LEN + 1]
    ids = text[0]
    starts = torch.randint(len(ids) - SEQ_LEN, (BATCH, 1), generator=generator)
    return ids[starts + torch.arange(SEQ_LEN + 1)]


def xavier_model(block: Norms, n_layers: int, vocab_size: int, seed: int) -> Decoder:
    config = preset(
        "gpt2",
        vocab_size=vocab_size,
        max_seq_len=SEQ_LEN,
        n_layers=n_layers,
        d_model=D_MODEL,
        n_heads=4,
        block=block,
        feed_forward="gelu",
        tie_embeddings=False,
        dropout=0.0,
    )
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(decoder.embed.weight, std=1.0, generator=generator)
    nn.init.normal_(decoder.position_embed.weight, std=0.02, generator=generator)
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            matrices = parameter.data.chunk(3) if "qkv" in name else [parameter.data]  # q, k and v are a matrix each
            for matrix in matrices:
                nn.init.xavier_normal_(matrix, generator=generator)
    return decoder


def loss_of(decoder: Decoder, batch: Tensor) -> Tensor:
    """Nats a character."""
    return loss_sum(decoder(batch[:, :-1]), batch[:, 1:]) / batch[:, 1:].numel()


def gradient_norm(block: Norms, n_layers: int, text: Text, seeds: Iterable[int] = range(5)) -> float:
    """Of the last layer's second feed-forward matrix, at initialisation: the mean over seeds."""
    norms = []
    for seed in seeds:
        decoder = xavier_model(block, n_layers, text[1], seed)
        loss_of(decoder, draw_batch(text, torch.Generator().manual_seed(seed))).backward()
        norms.append(decoder.blocks[-1].ff.down.weight.grad.norm().item())
    return statistics.mean(norms)


def final_loss(
    block: Norms, lr: float, warmup_steps: int, text: Text, seed: int, *, n_layers: int = 6, steps: int = 300
) -> float:
    """Of the last 20 steps of a training with Adam: the learning rate rises for `warmup_steps`, then stays."""
    decoder = xavier_model(block, n_layers, text[1], seed)
    adam = torch.optim.Adam(decoder.parameters(), fused=True)
    generator = torch.Generator().manual_seed(1000 + seed)
    losses = []
    for step in range(steps):
        adam.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / max(1, warmup_steps))
        loss = loss_of(decoder, draw_batch(text, generator))
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return statistics.mean(losses[-20:])


def character_entropy(text: Text) -> float:
    """What a model pays that has learnt how frequent each character is, and nothing about what comes before."""
    shares = [count / len(text[0]) for count in Counter(text[0].tolist()).values()]
    return -sum(share * math.log(share) for share in shares)


def spread(values: list[float]) -> float:
    """The standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def plot(
    norms: dict[Norms, dict[int, float]], losses: dict[tuple[Norms, int], dict[float, list[float]]], path: str
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = {"pre": "C0", "post": "C3"}
    for block, by_depth in norms.items():
        left.plot(list(by_depth), list(by_depth.values()), marker="o", color=colours[block], label=f"{block}-norm")
    first, *_ = norms["pre"]
    left.plot(
        list(norms["pre"]),
        [norms["pre"][first] * math.sqrt(first / depth) for depth in norms["pre"]],
        color="0.6",
        linestyle="--",
        label="1 / √depth",
    )
    left.set(xscale="log", yscale="log", ylim=(0.1, 1.5), xlabel="layers", ylabel="gradient norm at initialisation")
    left.set_xticks(list(norms["pre"]), map(str, norms["pre"]))
    left.set_yticks([0.1, 0.2, 0.5, 1], ["0.1", "0.2", "0.5", "1"])
    for (block, warmup), by_lr in losses.items():
        means = [statistics.mean(values) for values in by_lr.values()]
        spreads = [spread(values) for values in by_lr.values()]
        label = f"{block}-norm, " + (f"warm-up of {warmup} steps" if warmup else "no warm-up")
        style = {"color": colours[block], "linestyle": "-" if warmup else ":", "marker": "o", "capsize": 3}
        right.errorbar(list(by_lr), means, spreads, label=label, **style)
    right.set(xscale="log", ylim=(2.3, 3.85), xlabel="learning rate", ylabel="final loss, nats a character")
    lrs = list(next(iter(losses.values())))
    right.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    for axes, corner in ((left, "lower left"), (right, "upper left")):
        axes.minorticks_off()
        axes.legend(fontsize=8, loc=corner)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=BUILTIN, metavar="FILE", help="a text (default: Python's own reference)")
    add_plot_option(parser)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    try:
        text = load_characters(arguments.data)
    except UserError as error:
        parser.error(str(error))

    depths = (2, 4, 8, 16, 32)
    norms: dict[Norms, dict[int, float]] = {
        block: {depth: gradient_norm(block, depth, text) for depth in depths} for block in ("pre", "post")
    }
    print("gradient norm at initialisation, by layers")
    print(f"{'':10}" + "".join(f"{depth:8}" for depth in depths))
    for block, by_depth in norms.items():
        print(f"{block}-norm".ljust(10) + "".join(f"{norm:8.3f}" for norm in by_depth.values()))

    lrs, seeds = (1e-3, 2e-3, 3e-3, 5e-3), range(arguments.seeds)
    losses: dict[tuple[Norms, int], dict[float, list[float]]] = {}
    print(f"\nfinal loss of 6 layers after 300 steps, {len(seeds)} seeds, by learning rate")
    print(" " * 31 + "".join(f"{lr:16g}" for lr in lrs))
    for block in ("pre", "post"):
        for warmup in (0, 100):
            of_setting = losses[block, warmup] = {}
            print(f"{block}-norm, {f'{warmup} steps of' if warmup else 'no'} warm-up".ljust(31), end="", flush=True)
            for lr in lrs:
                values = of_setting[lr] = [final_loss(block, lr, warmup, text, seed) for seed in seeds]
                print(f"   {statistics.mean(values):.3f} ± {spread(values):.3f}", end="", flush=True)
            print()
    print(f"the frequencies of characters alone would give {character_entropy(text):.3f}")
    if arguments.plot:
        plot(norms, losses, arguments.plot)


if __name__ == "__main__":
    main()
