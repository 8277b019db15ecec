"""Proofs about learning: what the loss asks for, whom it counts, what it is at the beginning, and what it moves."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from pathlib import Path
from statistics import NormalDist, mean

import numpy as np
import torch
from torch import Tensor

from leftward import runs
from leftward.config import Config
from leftward.data.batches import IGNORED, Split
from leftward.model.decoder import Decoder
from leftward.proofs.report import Fails, Skips
from leftward.proofs.small import scaled_down
from leftward.proofs.subject import Subject
from leftward.training import loss, optim
from leftward.training.progress import Interrupted, Observer

_FRESH_PARAMETERS = 60_000_000  # up to which a fresh model is made to measure its first loss
_STEPS = (80, 400)  # in which a small model learns a cycle by heart: most do in the first, all in the second

_NO_LOSS = "give loss_fn: (model, ids) → the loss that trains it"

# ---- what the loss asks for


def targets_are_next(subject: Subject) -> str:
    """The loss of training against the loss of each position's next token, computed by hand."""
    ids = subject.need(4)
    batch = subject.draw(3, ids.shape[1], salt=5)
    if subject.loss_fn is not None:
        given = float(_call(subject, batch))
        rows = list(batch)
    else:
        decoder = subject.the_decoder(_NO_LOSS)
        # One stream in windows, as a validation split is read: no window is padded.
        stream = batch.flatten()[: 2 * ids.shape[1] + 1]
        evaluation = loss.evaluate(decoder, _split(stream), ids.shape[1], subject.device)
        assert evaluation is not None
        given = evaluation.loss
        rows = [stream[: ids.shape[1] + 1], stream[ids.shape[1] :]]
    logits = [subject.ask(row[None, : ids.shape[1]])[0] for row in rows]
    wanted = _mean_loss(rows, logits, 1)
    if _agree(subject, given, wanted):
        return f"a loss of {given:.4f}, and {wanted:.4f} by hand"
    for shift, name in _SHIFTS.items():
        if _agree(subject, given, _mean_loss(rows, logits, shift)):
            raise Fails(f"the loss is that of {name} ({given:.4f}; of the next token it is {wanted:.4f})")
    count = sum(_count(row, part, 1) for row, part in zip(rows, logits, strict=True))
    if _agree(subject, given / count, wanted):
        raise Fails(f"the loss is the sum over {count} tokens, not their mean ({given:.4f}, the mean is {wanted:.4f})")
    around = [torch.cat((row, row[:1])) for row in rows]
    if _agree(subject, given, _mean_loss(around, logits, 1)):
        raise Fails(f"the last position is asked for the first token: targets are rolled around ({given:.4f})")
    raise Fails(f"the loss is {given:.4f}, and that of the next token, by hand, {wanted:.4f}")


_SHIFTS = {
    0: "the present token: targets are not shifted, so that the model learns to repeat its input",
    2: "the token after the next: targets are shifted twice",
    -1: "the token before: targets are shifted the wrong way",
}


def padding_is_not_counted(subject: Subject) -> str:
    """The loss of padded rows is the mean over their real targets."""
    ids = subject.need(4)
    length = ids.shape[1]
    counts = [length, length // 2 + 1, 2]
    batch = subject.draw(3, length, salt=6)
    rows = [row[:count] for row, count in zip(batch, counts, strict=True)]
    logits = [subject.ask(row[None])[0] for row in rows]
    wanted = _mean_loss(rows, logits, 1)
    if subject.loss_fn is not None:
        if subject.pad_id is None:
            raise Skips("loss_fn's padding is not known: give its pad_id")
        for row, count in zip(batch, counts, strict=True):
            row[count:] = subject.pad_id
        given = float(_call(subject, batch))
    else:
        decoder = subject.the_decoder(_NO_LOSS)
        targets = torch.full_like(batch, IGNORED)
        for row, count in enumerate(counts):
            targets[row, : count - 1] = batch[row, 1:count]
        with torch.inference_mode():
            hidden = decoder.hidden(batch.to(subject.device))
            summed = loss.head_loss(decoder, hidden, targets.to(subject.device))
        given = float(summed) / (sum(counts) - len(counts))
    if _agree(subject, given, wanted):
        return f"rows of {counts[0]}, {counts[1]} and {counts[2]} tokens, padded: {given:.4f}, and {wanted:.4f} by hand"
    of_rows = float(np.mean([_mean_loss([row], [part], 1) for row, part in zip(rows, logits, strict=True)]))
    if _agree(subject, given, of_rows):
        raise Fails(f"the loss is a mean of the rows' means ({given:.4f}): short rows count too much ({wanted:.4f})")
    raise Fails(f"padding is counted: the loss is {given:.4f}, over the real tokens {wanted:.4f}")


def learns_the_next(subject: Subject) -> str:
    """A small model of the same architecture, through the whole of training: prepare, loop, save, load."""
    small = scaled_down(subject.the_decoder("our training is for our Decoder").config)
    letters = "".join(np.random.default_rng(subject.seed).permutation(list("abcdefghijklmnopqrstuvwxyz")))
    for steps in _STEPS:
        shares = _trained_on(letters, small, steps)
        if shares[1] > 0.8:
            return f"after {steps} steps {shares[1]:.0%} of the letters of a cycle are followed by the right one"
        for shift in (0, 2):
            if shares[shift] > 0.5:
                name = _SHIFTS[shift].partition(":")[0]
                raise Fails(f"trained on a cycle of letters, the model says {name} ({shares[shift]:.0%} of positions)")
    raise Fails(f"trained on a cycle of 26 letters for {steps} steps, it follows only {shares[1]:.0%} of them rightly")


def _trained_on(letters: str, config: Config, steps: int) -> dict[int, float]:
    """The share of positions at which a model trained on a cycle of letters says the letter 0, 1 or 2 places on."""
    fields = {name: value for name, value in config.to_dict().items() if name != "vocab_size"}
    seq_len = min(len(letters), config.max_seq_len)
    with tempfile.TemporaryDirectory(prefix="leftward-check-") as directory:
        text = Path(directory) / "letters.txt"
        text.write_text(letters * 40, encoding="utf-8")
        recipe = {
            "out": str(Path(directory) / "run"),
            "data": {"path": str(text)},
            "tokenizer": {"kind": "char"},
            "model": {**fields, "dropout": 0.0},
            "training": {
                "max_steps": steps,
                "batch_size": 8,
                "seq_len": seq_len,
                "eval_interval": 0,
                "log_interval": steps,
                "device": "cpu",
                "dtype": "fp32",
            },
            "optimizer": {"name": "adamw", "adamw_lr": 0.01},
        }
        try:
            model = runs.train(recipe, observer=Observer()).model
        except Interrupted:  # training has its own way to end; here it is the check that somebody wants to end
            raise KeyboardInterrupt from None
    ids = torch.tensor([model.tokenizer.encode(letters * 2)[: seq_len + 2]])
    with torch.no_grad():
        said = model.decoder(ids[:, :seq_len]).argmax(dim=-1)[0]
    return {shift: float((said == ids[0, shift : shift + seq_len]).float().mean()) for shift in (0, 1, 2)}


def _call(subject: Subject, batch: Tensor) -> Tensor:
    assert subject.loss_fn is not None
    with torch.no_grad():
        return subject.loss_fn(subject.exact, batch)


def _agree(subject: Subject, a: float, b: float) -> bool:
    """Losses are means of many logits, each of which may be off by the rounding of the model's dtype."""
    return abs(a - b) <= max(subject.tolerance, 1e-5 * (1 + abs(b)))


def _mean_loss(rows: list[Tensor], logits: list[Tensor], shift: int) -> float:
    """−ln p of the token `shift` after each position, a mean over all positions that have one; in float64."""
    total, count = 0.0, 0
    for row, part in zip(rows, logits, strict=True):
        n = _count(row, part, shift)
        first = max(0, -shift)
        targets = row[first + shift : first + shift + n]
        total -= float(part[first : first + n].double().log_softmax(dim=-1).gather(1, targets[:, None]).sum())
        count += n
    return total / count


def _count(row: Tensor, logits: Tensor, shift: int) -> int:
    return min(len(logits), len(row) - shift) - max(0, -shift)


def _split(tokens: Tensor) -> Split:
    """Tokens as if they were prepared data."""
    return Split("val", [tokens.cpu().numpy()], {"documents": 1, "characters": 1, "bytes": 1})


# ---- the beginning


def first_loss(subject: Subject) -> str:
    """A fresh model's loss on random tokens."""
    config = subject.the_decoder("how a fresh one is drawn is known of our Decoder only").config
    size = subject.n_parameters
    which = ""
    if size > _FRESH_PARAMETERS:
        config, which = scaled_down(config), " (of a scaled-down copy)"
    fresh = Decoder(config).eval()
    length = min(config.max_seq_len, 64)
    rows = max(1, 1024 // length)
    generator = subject.generator(7)
    ids = torch.randint(config.vocab_size, (rows, length), generator=generator)
    targets = torch.randint(config.vocab_size, (rows, length), generator=generator)
    with torch.no_grad():
        logits = fresh(ids).flatten(0, 1).double()
    losses = logits.logsumexp(dim=-1) - logits.gather(1, targets.flatten()[:, None])[:, 0]
    measured, spread = float(losses.mean()), float(losses.std())
    expected, tolerance = expected_first_loss(config), 4 * spread / math.sqrt(len(losses)) + 0.05
    found = f"{measured:.3f}{which}, expected {expected:.3f} ± {tolerance:.3f}; ln {config.vocab_size} is "
    found += f"{math.log(config.vocab_size):.3f}"
    if not abs(measured - expected) <= tolerance:
        raise Fails(f"a fresh model's loss is {found}")
    return found


def expected_first_loss(config: Config) -> float:
    """What the loss of a fresh Decoder on random targets is, in nats.

    The head reads a vector of RMS 1 (a norm comes last), and its rows are drawn with std 0.02. So the logits of other
    tokens are N(0, σ²), σ = 0.02 √d_model, and their part of the partition is (V − 1) e^(σ²/2).

    The token itself has such a logit too, unless the head is tied to the embedding: then the vector still points to the
    token's own row, with a cosine of c, and the logit is 0.02 d_model c (5.1 c where d_model is 256), give or take
    σ √(1 − c²/2): rows differ in length (σ² c²/2), and the rest of the vector is random (σ² (1 − c²)). c is what is
    left of the token beside what was added to it: its position, and, in blocks with a norm behind each sublayer,
    2 n_layers vectors of RMS 1.

    The targets are random: 1 in V is the token itself.
    """
    std, vocab_size = 0.02, config.vocab_size
    token = std * config.embed_scale
    position = {"learned": std, "sinusoidal": math.sqrt(0.5)}.get(config.positions, 0.0)
    added = 2 * config.n_layers if config.block in ("sandwich", "output") else 0
    if config.embed_norm:
        token, position = (part / math.hypot(token, position) for part in (token, position))
    c = token / math.sqrt(token**2 + position**2 + added) if config.tie_embeddings else 0.0
    sigma = std * math.sqrt(config.d_model)

    def scaled(logit: float) -> float:
        logit *= config.logit_scale
        return logit if config.logit_softcap is None else config.logit_softcap * math.tanh(logit / config.logit_softcap)

    normal = NormalDist(std * config.d_model * c, sigma * math.sqrt(1 - c**2 / 2))
    own = [scaled(normal.inv_cdf((i + 0.5) / 32)) for i in range(32)]
    others = math.log(vocab_size - 1) + scaled(sigma) ** 2 / 2 if vocab_size > 1 else -math.inf
    partitions = [max(others, logit) + math.log1p(math.exp(-abs(others - logit))) for logit in own]
    return mean(partitions) - mean(own) / vocab_size


# ---- what it moves


def gradients_reach_all(subject: Subject) -> str:
    """Every weight has a gradient."""
    ids = subject.need(2)
    named = [(n, p) for n, p in subject.awake.named_parameters() if p.is_floating_point()]
    frozen = [name for name, p in named if not p.requires_grad]
    if len(frozen) == len(named):
        raise Skips("no weight asks for gradients: the model is frozen whole")
    if frozen:
        raise Fails(_listing(frozen, len(named), "frozen (requires_grad is false)"))
    batch = subject.draw(max(2, 192 // ids.shape[1]), ids.shape[1], salt=8)
    with torch.enable_grad():
        logits = subject.logits_of(subject.awake(batch), batch)
        loss_value = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
        if not loss_value.requires_grad:
            raise Fails("the logits have no gradient: something detaches them")
        gradients = torch.autograd.grad(loss_value, [p for _, p in named], allow_unused=True)
    paired = [(name, g) for (name, _), g in zip(named, gradients, strict=True)]
    if bad := [name for name, g in paired if g is not None and not g.isfinite().all()]:
        raise Fails(_listing(bad, len(named), "given a gradient of NaN or infinity"))
    # An expert that none of these tokens was sent to has none, and is sound.
    if still := [name for name, g in paired if (g is None or not g.any()) and "expert" not in name]:
        raise Fails(_listing(still, len(named), "given no gradient: they never learn"))
    norm = math.sqrt(sum(float(g.float().square().sum()) for _, g in paired if g is not None))
    return f"all {len(named)} weight tensors; the gradient's norm is {norm:.3g}"


def groups_are_whole(subject: Subject) -> str:
    """Every weight that is to learn is in exactly one group of the optimizer."""
    names = [name for name, weight in subject.model.named_parameters() if weight.requires_grad]
    if subject.optimizer is not None:
        of_id = {id(p): name for name, p in subject.model.named_parameters()}
        groups = [[of_id[id(p)] for p in g["params"] if id(p) in of_id] for g in subject.optimizer.param_groups]
    else:
        subject.the_decoder("give the optimizer that is to train it")
        groups = [[*group] for group in optim.parameter_groups(subject.model).values()]
    held = Counter(name for group in groups for name in group)
    if absent := [name for name in names if not held[name]]:
        raise Fails(_listing(absent, len(names), "in no group: the optimizer never moves them"))
    if double := [name for name, count in held.items() if count > 1]:
        raise Fails(_listing(double, len(names), "in more than one group: they are moved twice a step"))
    sizes = " + ".join(str(len(group)) for group in groups)
    return f"{len(names)} weight tensors, each in one group: {sizes}"


def _listing(names: list[str], total: int, what: str) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} of {total} weight tensors are {what}: {shown}"
