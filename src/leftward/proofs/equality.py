"""Proofs that two ways to the same logits agree: alone and in a batch, with a cache and without, packed and apart."""

from __future__ import annotations

import contextlib
import itertools

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.generation.settings import Sampling
from leftward.language_model import LanguageModel
from leftward.proofs.report import Fails, Skips
from leftward.proofs.subject import Subject, distance

_NEW = 12  # tokens generated
MOST_OF_PRECISION = 0.25
"""Of the logits' spread: how far a model in bf16 may be from itself in fp32. Some 30 layers of roundings of 0.4 % come
to 2 to 10 %; a token misplaced comes to more than 50 %."""


def runs(subject: Subject) -> str:
    ids = subject.ids
    logits = subject.ask(ids)
    if logits.shape[1] != ids.shape[1]:
        raise Fails(f"{ids.shape[1]} ids give logits of {logits.shape[1]} positions")
    return f"ids {list(ids.shape)} → logits {list(logits.shape)}, {subject.dtype}".replace("torch.", "")


def is_finite(subject: Subject) -> str:
    """No NaN and no infinity, in weights and in logits."""
    bad = [name for name, p in subject.model.named_parameters() if p.is_floating_point() and not p.isfinite().all()]
    if bad:
        raise Fails(f"NaN or infinity in {bad[0]}" + (f" and {len(bad) - 1} other weights" if len(bad) > 1 else ""))
    logits = subject.ask(subject.ids)
    if not logits.isfinite().all():
        position = int((~logits.isfinite()).any(dim=-1)[0].nonzero()[0])
        raise Fails(f"the weights are finite, but the logits are not, from position {position} on")
    return f"{subject.n_parameters:,} weights and all logits; the largest logit is {float(logits.abs().max()):.3g}"


def is_repeatable(subject: Subject) -> str:
    """The same input twice."""
    first, second = subject.ask(subject.ids), subject.ask(subject.ids)
    difference = distance(first, second)
    if not difference <= 8 * torch.finfo(first.dtype).eps * float(first.abs().max()):
        raise Fails(
            f"two passes over one input differ by {difference:.1e}: something random is at work in evaluation mode, "
            "such as dropout"
        )
    return f"two passes over one input differ by {difference:.0e}"


def of_one_token(subject: Subject) -> str:
    """One row of one token, which shapes that happen to be 1 break."""
    one = subject.ids[:, :1]
    logits = subject.ask(one)
    if tuple(logits.shape[:2]) != (1, 1):
        raise Fails(f"one token gives logits {list(logits.shape)}")
    difference = subject.compare("one token alone", logits, subject.ask(subject.ids)[:, :1])
    return f"one row of one token gives the logits that begin a longer one: they differ by {difference:.0e}"


def beyond_the_context(subject: Subject) -> str:
    """A position beyond max_seq_len is refused in words."""
    decoder = subject.the_decoder()
    length = decoder.config.max_seq_len
    if (length + 1) * decoder.config.d_model > 1 << 28:
        raise Skips(f"{length + 1:,} tokens are too many to try it")
    zeros = torch.zeros(1, length + 1, dtype=torch.int64, device=subject.device)
    try:
        subject.ask(zeros)
    except ValueError as error:
        if str(length) not in str(error):
            raise Fails(f"the error does not name the limit of {length}: {error}") from None
        return f"{length + 1} tokens are refused: “{error}”"
    raise Fails(f"{length + 1} tokens give logits, though max_seq_len is {length}")


# ---- rows of a batch


def alone_is_in_a_batch(subject: Subject) -> str:
    """A row's logits depend neither on its neighbours nor on how many they are."""
    ids = subject.ids
    length = ids.shape[1]
    batch = torch.cat((ids, subject.draw(2, length, salt=1)))
    others = torch.cat((ids, subject.another(batch[1:])))
    row = subject.ask(batch)[:1]
    neighbours = subject.compare("a row changes with its neighbours' tokens", subject.ask(others)[:1], row)
    number = subject.compare("a row changes with the number of rows", subject.ask(ids), row)
    return f"a row differs by {neighbours:.0e} with its neighbours' tokens, by {number:.0e} with their number"


def padding_is_unseen(subject: Subject) -> str:
    """Rows of unequal length, padded on the right, have the logits that each has alone."""
    ids = subject.need(4)
    length = ids.shape[1]
    counts = [length, length // 2, 1]
    batch = subject.draw(3, length, salt=3)  # whatever stands in the padding
    options = {} if subject.config is None else {"lengths": counts}
    together = subject.ask(batch, **options)
    most = 0.0
    for row, count in enumerate(counts):
        alone = subject.ask(batch[row : row + 1, :count])
        padding = f"the {length - count} of padding to its right" if count < length else "shorter rows beside it"
        what = f"a row of {count} tokens changes with {padding}"
        most = max(most, subject.compare(what, together[row : row + 1, :count], alone))
    return f"rows of {counts[0]}, {counts[1]} and 1 tokens differ by {most:.0e} from each alone"


def documents_are_apart(subject: Subject) -> str:
    """Documents packed into one row have the logits that each has alone."""
    subject.the_decoder()
    ids = subject.need(4)
    length = ids.shape[1]
    cuts = [0, length // 4, length // 4 + 1, length]
    numbers = torch.zeros_like(ids)
    for number, start in enumerate(cuts[:-1]):
        numbers[0, start:] = number + 1
    packed = subject.ask(ids, documents=numbers)
    most = 0.0
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        alone = subject.ask(ids[:, start:end])
        first = distance(packed[:, start : start + 1], alone[:, :1])
        seen = "its own first token already differs: it sees another document, or its position is not 0"
        what = f"document {number + 1} of 3 in a row" + (f"; {seen}" if first > subject.tolerance else "")
        most = max(most, subject.compare(what, packed[:, start:end], alone))
    return f"3 documents in one row differ by {most:.0e} from each alone"


# ---- through the cache


def cached_is_full(subject: Subject) -> str:
    """A prompt in one pass and then token after token: the logits of the whole at once."""
    ids = subject.need(3)
    length = ids.shape[1]
    prompt = length // 2
    parts = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    whole = subject.ask(ids)
    logits, _ = subject.read_through_cache(parts)
    place, most = 0, 0.0
    for part in logits:
        if place == 0:
            what = "already the prompt that fills the cache"
        elif place == prompt:
            what = f"the prompt agrees, but not the first token behind the cache (position {place})"
        else:
            what = f"{place - prompt} tokens behind the cache agree, but not that of position {place}"
        most = max(most, subject.compare(what, part, whole[:, place : place + part.shape[1]]))
        place += part.shape[1]
    return f"a prompt of {prompt} and {length - prompt} tokens one by one differ by {most:.0e} from one pass"


def chunks_are_whole(subject: Subject) -> str:
    """A prompt that is read in pieces of several tokens."""
    ids = subject.need(3)
    length = ids.shape[1]
    sizes = [1, 3, 2, length] if length > 6 else [1, length]
    parts, place = [], 0
    for size in sizes:
        parts.append(ids[:, place : place + size])
        place += size
    logits, _ = subject.read_through_cache(parts)
    most = subject.compare("read in chunks", torch.cat(logits, dim=1), subject.ask(ids))
    return f"chunks of {', '.join(str(part.shape[1]) for part in parts)} tokens differ by {most:.0e} from one pass"


def rewound_is_new(subject: Subject) -> str:
    """Tokens that were taken back leave nothing behind."""
    ids = subject.need(4)
    back = min(5, ids.shape[1] // 2)
    kept = ids.shape[1] - back
    _, cache = subject.read_through_cache([ids])
    if hasattr(cache, "rewind"):
        cache.rewind([kept])
    elif hasattr(cache, "crop"):
        try:
            cache.crop(-back)
        except RuntimeError as refusal:  # a window of transformers' that has rolled
            raise Skips(f"its cache refuses: {refusal}") from None
    else:
        raise Skips(f"a {type(cache).__name__} can't take tokens back")
    other = torch.cat((ids[:, :kept], subject.another(ids[:, kept:])), dim=1)
    logits, _ = subject.read_through_cache([other[:, kept:]], cache)
    most = subject.compare(f"{back} tokens taken back, others read", logits[0], subject.ask(other)[:, kept:])
    return f"{back} tokens taken back and others read instead: {most:.0e} from the others alone"


def forks_are_apart(subject: Subject) -> str:
    """Two continuations of one cache, and the cache itself."""
    subject.the_decoder()
    ids = subject.need(3)
    start = ids.shape[1] // 2
    continued = [ids[:, start:], subject.another(ids[:, start:])]
    _, cache = subject.read_through_cache([ids[:, :start]])
    both = cache.fork([0, 0])
    logits = subject.ask(torch.cat(continued), cache=both)
    most = 0.0
    for row, rest in enumerate(continued):
        whole = subject.ask(torch.cat((ids[:, :start], rest), dim=1))[:, start:]
        most = max(most, subject.compare(f"continuation {row + 1} of 2", logits[row : row + 1], whole))
    parent, _ = subject.read_through_cache([ids[:, start:]], cache)
    most = max(most, subject.compare("the cache that was forked", parent[0], subject.ask(ids)[:, start:]))
    return f"two continuations of one cache, and a third of the cache itself, differ by {most:.0e} from one pass"


def unequal_rows_are_alone(subject: Subject) -> str:
    """Rows of unequal length in one cache, each going on where it ends."""
    ids = subject.need(6)
    length = ids.shape[1]
    counts = [length // 2, 1, length // 3]
    cache = subject.new_cache(3)
    batch = subject.draw(3, length, salt=4)
    longest = max(counts)
    first = subject.ask(batch[:, :longest], cache=cache, lengths=counts)
    steps = min(3, length - longest)
    later = []
    for step in range(steps):
        column = torch.stack([batch[row, count + step] for row, count in enumerate(counts)])[:, None]
        later.append(subject.ask(column, cache=cache))
    most = 0.0
    for row, count in enumerate(counts):
        alone = subject.ask(batch[row : row + 1, : count + steps])
        logits = torch.cat((first[row, :count], *(step[row] for step in later)))[None]
        prompt = distance(logits[:, :count], alone[:, :count])
        where = "in its prompt" if prompt > subject.tolerance else f"behind its own end, at position {count}"
        most = max(most, subject.compare(f"the row of {count} tokens beside one of {longest}, {where}", logits, alone))
    return f"rows of {', '.join(map(str, counts))} tokens and {steps} more each differ by {most:.0e} from each alone"


def rolled_window_is_full(subject: Subject) -> str:
    """A window that has moved on, so that its cache holds new tokens in the slots of old ones."""
    config = subject.the_decoder().config
    if config.window is None:
        raise Skips("no layer has a window")
    ids = subject.long_ids
    length, window = ids.shape[1], config.window
    if window + 3 > length:
        raise Skips(f"{length} tokens are too few for a window of {window:,} to move on")
    whole = subject.ask(ids)
    most = 0.0
    for size in (1, 3):
        cache = subject.new_cache(1, capacity=length, rewindable=1)
        logits, _ = subject.read_through_cache(list(ids.split(size, dim=1)), cache)
        most = max(most, subject.compare(f"tokens read by {size}", torch.cat(logits, dim=1), whole))
    return f"{length} tokens through a window of {window} differ by {most:.0e} from one pass"


def own_precision_is_near(subject: Subject) -> str:
    """A model in bf16 or fp16 beside the same weights in fp32, in one pass and through a cache."""
    if subject.digits_suffice:
        raise Skips("the model computes in fp32 or more")
    ids = subject.need(3)
    prompt = ids.shape[1] // 3
    exact = subject.ask(ids).float()
    with torch.no_grad():
        ways = {"in one pass": subject.logits_of(subject.awake(ids), ids)}
    with contextlib.suppress(Skips):  # a model without a cache
        parts, cache = [], None
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            logits, cache = subject.read(part, cache, subject.awake)
            parts.append(logits)
        ways["through a cache"] = torch.cat(parts[1:], dim=1)
    found = []
    for way, logits in ways.items():
        wanted = exact[:, -logits.shape[1] :]
        error = (logits.float() - wanted).square().mean(dim=-1).sqrt() / wanted.std(dim=-1)
        typical = float(error.median())  # where a router's choice flips, one position is far off and nothing is wrong
        found.append(f"{typical:.1%} {way}")
        if not typical <= MOST_OF_PRECISION:
            raise Fails(f"{way} logits are {typical:.0%} of their spread from those of the same weights in fp32")
    return f"logits are {' and '.join(found)} of their spread from fp32"


def greedy_is_recomputed(subject: Subject) -> str:
    """The most likely token again and again, on the cache, and by reading all anew for each."""
    prompt = subject.need(3)[:, : max(1, subject.ids.shape[1] // 3)]
    room = subject.ids.shape[1] - prompt.shape[1]
    excluded: Tensor | None = None
    if (model := subject.language_model) is not None:
        excluded = _without_text(model).to(subject.device)
        text = model.tokenizer.decode(prompt[0][~excluded[prompt[0]]].tolist())
        start = model.tokenizer.encode(text, add_bos=True)
        new = _generated(model, text, min(_NEW, model.config.max_seq_len - len(start)))
        prompt = torch.tensor([start], device=subject.device)
    else:
        new = _continued(subject, prompt, min(_NEW, room))
    ids = prompt
    for number, token in enumerate(new):
        logits = subject.ask(ids)[0, -1].float()
        if excluded is not None:
            logits = logits.masked_fill(excluded, -torch.inf)
        best = int(logits.argmax())
        if token != best and float(logits[best] - logits[token]) > 2 * subject.tolerance:
            raise Fails(f"token {number + 1} of {len(new)} is {token} on the cache, and {best} when all is read anew")
        ids = torch.cat((ids, torch.tensor([[token]], device=ids.device)), dim=1)
    return f"{len(new)} tokens generated on the cache are the most likely ones without it"


def _generated(model: LanguageModel, text: str, n: int) -> list[int]:
    events = model.events([text], Sampling(max_tokens=n, temperature=0.0))
    return [event.token_id for event in events if event.token_id is not None]


def _continued(subject: Subject, prompt: Tensor, n: int) -> list[int]:
    new: list[int] = []
    part, cache = prompt, None
    for _ in range(n):
        logits, cache = subject.read(part, cache)
        new.append(int(logits[0, -1].float().argmax()))
        part = torch.tensor([new[-1:]], device=prompt.device)
    return new


def _without_text(model: LanguageModel) -> Tensor:
    """bool [vocab_size]: ids that pad the vocabulary, which are never generated."""
    excluded = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    for token_id in range(model.config.vocab_size):
        try:
            model.tokenizer.token_bytes(token_id)
        except UserError:
            excluded[token_id] = True
    return excluded
