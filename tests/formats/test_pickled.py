"""pytorch_model.bin: tensors in a dict are read as they were saved; a pickle that asks for anything else is not run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leftward import Config
from leftward.errors import UserError
from leftward.formats.contents import contents_of
from leftward.formats.model_directory import load_model, save_model
from leftward.formats.pickled import read_pickled
from random_models import random_decoder, random_ids

CONFIG = Config(vocab_size=31, max_seq_len=16, n_layers=2, d_model=16, n_heads=2, d_ff=32, tie_embeddings=False)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A model directory without its weights, and the weights under their names in it."""
    from safetensors.torch import load_file

    save_model(tmp_path / "run", CONFIG, random_decoder(CONFIG).state_dict())
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "model.safetensors").unlink()
    return tmp_path / "run", {name: tensor.clone() for name, tensor in tensors.items()}


def refused(path: Path, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_pickled(path)
    message = str(caught.value)
    assert words in message and str(path) in message
    assert "\n" not in message and len(message) < 2000


# ---- what torch.save writes


@pytest.mark.parametrize("new", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("wrap", [dict, OrderedDict], ids=lambda kind: kind.__name__)
def test_a_directory_with_a_pickle_is_its_model(
    saved: tuple[Path, dict[str, Tensor]], new: bool, wrap: Callable[..., Any]
) -> None:
    directory, tensors = saved
    tensors["lm_head.weight"] = torch.nn.Parameter(tensors["lm_head.weight"])
    torch.save(wrap(tensors), directory / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    decoder, _, _ = load_model(directory)
    assert decoder.config == CONFIG
    for name, tensor in random_decoder(CONFIG).state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor), name
    decoder.train()(random_ids(CONFIG, 2, 8)).sum().backward()
    with torch.no_grad():
        decoder.embed.weight.add_(1)  # a mapped file is copied on write
    assert torch.equal(load_model(directory)[0].embed.weight + 1, decoder.embed.weight)


@pytest.mark.parametrize("new", [True, False])
def test_shards_of_an_index(saved: tuple[Path, dict[str, Tensor]], new: bool) -> None:
    directory, tensors = saved
    places = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        shard = f"pytorch_model-0000{i}-of-00002.bin"
        torch.save({name: tensors[name] for name in names}, directory / shard, _use_new_zipfile_serialization=new)
        places |= dict.fromkeys(names, shard)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    decoder, _, _ = load_model(directory)
    for name, tensor in random_decoder(CONFIG).state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor), name


def test_safetensors_are_preferred(saved: tuple[Path, dict[str, Tensor]]) -> None:
    directory, _ = saved
    (directory / "pytorch_model.bin").write_bytes(b"no pickle")
    save_model(directory, CONFIG, random_decoder(CONFIG).state_dict())
    load_model(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"pytorch_model.bin is damaged"):
        load_model(directory)


def test_every_dtype_and_layout_comes_back(tmp_path: Path) -> None:
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    tensors = {str(dtype): torch.randn(3, 4).to(dtype) for dtype in (*floats, torch.int64, torch.uint8, torch.bool)}
    tensors |= {"transposed": torch.randn(3, 4).t(), "part": torch.randn(9)[2:5], "empty": torch.zeros(0, 3)}
    tensors["a scalar"] = torch.tensor(3.0)
    torch.save(tensors, tmp_path / "x.bin")
    back = read_pickled(tmp_path / "x.bin")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].double(), tensor.double())


def test_tensors_that_share_their_bytes_are_apart_afterwards(tmp_path: Path) -> None:
    embed = torch.randn(5, 4)
    torch.save({"embed": embed, "head": embed, "row": embed[1]}, tmp_path / "x.bin")
    back = read_pickled(tmp_path / "x.bin")
    assert torch.equal(back["head"], embed) and torch.equal(back["row"], embed[1])
    back["embed"].zero_()
    assert torch.equal(back["head"], embed) and torch.equal(back["row"], embed[1])


def test_what_is_in_it_is_listed(saved: tuple[Path, dict[str, Tensor]]) -> None:
    directory, tensors = saved
    torch.save(tensors | {"half": torch.zeros(2, dtype=torch.bfloat16)}, directory / "pytorch_model.bin")
    torch.save({"seed": 1}, directory / "training_args.bin")
    for path in (directory, directory / "pytorch_model.bin"):
        contents = contents_of(path)
        assert contents["parameters"] == random_decoder(CONFIG).n_parameters + 2
        assert {tensor["kind"] for tensor in contents["tensors"]} == {"F32", "BF16"}
        assert [32, 16] in [tensor["shape"] for tensor in contents["tensors"]]


# ---- what a pickle can ask for


class Calls:
    """Pickled, an order to call something."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.order = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.order


ORDERS = {
    "posix.system": Calls(os.system, "touch {marker}"),
    "builtins.eval": Calls(eval, "open('{marker}', 'w')"),
    "builtins.bytearray": Calls(bytearray, 10**12),
    "torch.hub.load": Calls(torch.hub.load, "a/b", "c"),
    "torch._tensor._rebuild_from_type_v2": Calls(torch._tensor._rebuild_from_type_v2, 1, 2, 3, 4),  # type: ignore
    "numpy": __import__("numpy").float32(1.0),
}


@pytest.mark.parametrize("asked", ORDERS)
@pytest.mark.parametrize("how", ["zip", "before-1.6", "plain", "plain-4"])
def test_a_pickle_that_asks_for_anything_else_is_not_run(tmp_path: Path, asked: str, how: str) -> None:
    path, marker = tmp_path / "x.bin", tmp_path / "marker"
    order = ORDERS[asked]
    if isinstance(order, Calls):
        function, arguments = order.order
        order = Calls(function, *(a.format(marker=marker) if isinstance(a, str) else a for a in arguments))
    content = {"x": torch.zeros(2), "y": order}
    if how.startswith("plain"):
        path.write_bytes(pickle.dumps(order, protocol=4 if how == "plain-4" else 2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    refused(path, asked.rpartition(".")[2])  # the module has another name in old protocols and on other systems
    refused(path, "its pickle asks for ")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.zeros(2)], "holds list, not a dict"),
        (torch.zeros(2), "holds Tensor, not a dict"),
        ({"x": torch.zeros(2), "step": 3}, "'step' is int; expected"),
        ({"state_dict": {"x": torch.zeros(2)}}, "'state_dict' is dict; expected"),
        ({3: torch.zeros(2)}, "3 is Tensor; expected"),
        ({"x": torch.zeros(1).expand(10**6, 10**6)}, "its bytes are too few"),
        ({f"x{i}": t for i, t in enumerate([torch.zeros(10**4)] * 30)}, "its bytes are too few"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "asks for torch"),
        ({"x": torch.zeros(2, device="meta")}, "asks for torch"),
    ],
)
def test_what_is_no_state_dict_is_said(tmp_path: Path, content: Any, words: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # sparse tensors are said to be new
        torch.save(content, tmp_path / "x.bin")
    refused(tmp_path / "x.bin", words)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "x.bin", "is missing")


# ---- damage


def archive(tmp_path: Path, change: Callable[[str, bytes], bytes] = lambda name, data: data, **settings: Any) -> Path:
    """What torch.save wrote, packed anew with changed members."""
    torch.save({"x": torch.arange(12.0), "y": torch.zeros(3, 4)}, tmp_path / "whole.bin")
    with zipfile.ZipFile(tmp_path / "whole.bin") as whole, zipfile.ZipFile(tmp_path / "x.bin", "w", **settings) as new:
        for name in whole.namelist():
            new.writestr(name, change(name, whole.read(name)))
    return tmp_path / "x.bin"


def test_numbers_that_the_file_does_not_hold(tmp_path: Path) -> None:
    """12 numbers become 10⁹ (BININT1 → BININT), in the storage and in the tensor."""
    lie, old = b"J" + (10**9).to_bytes(4, "little"), tmp_path / "old.bin"
    assert read_pickled(archive(tmp_path))["x"].shape == (12,)
    refused(archive(tmp_path, lambda name, data: data.replace(b"K\x0c", lie) if "pkl" in name else data), "damaged")
    torch.save({"x": torch.arange(12.0)}, old, _use_new_zipfile_serialization=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old.write_bytes(old.read_bytes().replace(b"K\x0c", lie))
    refused(old, "damaged")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    refused(archive(tmp_path, compression=zipfile.ZIP_DEFLATED), "its archive is compressed")


def test_tuples_that_take_for_ever_to_hash(tmp_path: Path) -> None:
    bomb = b"\x80\x02}" + b")" + b"q\x00h\x00\x86" * 60 + b"K\x01s."
    refused(archive(tmp_path, lambda name, data: bomb if name.endswith("data.pkl") else data), "nests tuples")
    (tmp_path / "plain.bin").write_bytes(bomb)
    refused(tmp_path / "plain.bin", "nests tuples")


@pytest.mark.parametrize("new", [True, False])
def test_a_file_cut_anywhere_or_changed_anywhere(tmp_path: Path, new: bool) -> None:
    """It is a state dict, whose tensors may hold other numbers, or one line."""
    buffer, path, chance = io.BytesIO(), tmp_path / "x.bin", random.Random(0)
    torch.save({"x": torch.arange(12.0), "y": torch.zeros(3, 4)}, buffer, _use_new_zipfile_serialization=new)
    whole = buffer.getvalue()
    cut = [whole[:length] for length in range(0, len(whole), 11 if new else 3)]
    places = [chance.randrange(len(whole)) for _ in range(400)]
    changed = [whole[:i] + bytes([chance.randrange(256)]) + whole[i + 1 :] for i in places]
    read = 0
    for content in [*cut, *changed]:
        path.write_bytes(content)
        try:
            tensors = read_pickled(path)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 2000
        else:
            read += 1
            assert content not in cut
            assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    assert read > 10
