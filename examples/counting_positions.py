"""What the KV cache saves: the token positions that pass through the model, counted as they pass.

    python examples/counting_positions.py

Every new token needs the model run again. Without a cache each run reads the whole prefix: for a 10-token prompt and 20
new tokens that is 10 + 11 + … + 29 = 390 positions. With one it reads what is new: 10, and then 19 times 1, which is 29
(nobody has to read the last token). The two loops below are all there is to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from leftward import Config, Decoder
from leftward.generation.decode import decode
from leftward.generation.settings import Sampling
from leftward.model.cache import KVCache
from leftward.text.tokenizer import Tokenizer

Choose = Callable[[Tensor], Tensor]


def most_likely(logits: Tensor) -> Tensor:
    """Greedy: [B, V] → [B, 1]."""
    return logits.argmax(dim=-1, keepdim=True)


@torch.inference_mode()
def recompute(decoder: Decoder, ids: Tensor, new_tokens: int, choose: Choose = most_likely) -> Tensor:
    """Continue `ids` [B, T], reading everything anew for each token: [B, T + new_tokens]."""
    for _ in range(new_tokens):
        logits = decoder(ids)[:, -1]
        ids = torch.cat((ids, choose(logits)), dim=1)
    return ids


@torch.inference_mode()
def with_cache(decoder: Decoder, ids: Tensor, new_tokens: int, choose: Choose = most_likely) -> Tensor:
    """The same, reading only what is new."""
    cache = KVCache(decoder.config, batch=ids.shape[0], capacity=ids.shape[1] + new_tokens - 1)
    new = ids
    for _ in range(new_tokens):
        logits = decoder(new, cache)[:, -1]
        new = choose(logits)
        ids = torch.cat((ids, new), dim=1)
    return ids


def package_loop(decoder: Decoder, ids: Tensor, new_tokens: int) -> Tensor:
    """The same with leftward's own decoding loop, which also streams text, stops, and samples each row by itself."""
    tokenizer = Tokenizer.train(["abcdefghijklmnopqrstuvwxyz"], kind="char", special_tokens=())
    sampling = Sampling(temperature=0, max_tokens=new_tokens)
    rows = ids.tolist()
    for event in decode(decoder, tokenizer, ids.tolist(), [sampling] * len(rows)):
        rows[event.row].append(event.token_id)
    return torch.tensor(rows)


@contextmanager
def counted(decoder: Decoder) -> Iterator[list[int]]:
    """A list that gets, for every forward pass, the positions that it reads."""
    passes: list[int] = []
    hook = decoder.embed.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].numel()))
    try:
        yield passes
    finally:
        hook.remove()


def small_model() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(Config(vocab_size=26, max_seq_len=64, n_layers=2, d_model=32, n_heads=4)).eval()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # fresh blocks add nothing yet: give every weight a say
    return decoder


def count(prompt_length: int = 10, new_tokens: int = 20) -> dict[str, tuple[list[int], list[int]]]:
    """For each way to generate: the positions that each pass read, and the tokens that came out."""
    decoder = small_model()
    ids = torch.randint(26, (1, prompt_length))
    results = {}
    for name, generate in {"recomputing": recompute, "with a cache": with_cache, "leftward's": package_loop}.items():
        with counted(decoder) as passes:
            output = generate(decoder, ids, new_tokens)
        results[name] = (passes, output[0].tolist())
    return results


def main() -> None:
    print("token positions read for a 10-token prompt and 20 new tokens")
    for name, (passes, _) in count().items():
        print(f"{name:13} {sum(passes):4} in {len(passes)} passes: {passes[0]}, {passes[1]}, … {passes[-1]}")
    tokens = [output for _, output in count().values()]
    print("all three gave the same tokens:", tokens[0] == tokens[1] == tokens[2])


if __name__ == "__main__":
    main()
