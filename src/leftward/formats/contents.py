"""What a model file or directory claims to hold, read from its header without loading it, and without torch but for
PyTorch's own files. Whether the claims make a model is for those who load it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leftward import files
from leftward.errors import UserError, printable
from leftward.formats.directory import check_model_directory
from leftward.formats.gguf import GGUF

Contents = dict[str, Any]

_LONGEST_TEXT = 100


def contents_of(path: Path | str) -> Contents:
    """`format`, `parameters` and `nbytes`, `metadata`, and the name, kind, shape and nbytes of each of `tensors`.

    Raises:
        UserError: it is missing, damaged, or neither GGUF, safetensors, a state dict of PyTorch nor a model directory.
    """
    path = Path(path)
    if path.is_dir():
        check_model_directory(path)
        metadata = files.read_json(path / "config.json")
        tensors = [tensor for file in sorted(path.glob("*.safetensors")) for tensor in _safetensors(file)[1]]
        if not tensors:  # other pickles may lie there, of the training's settings
            tensors = [tensor for file in sorted(path.glob("pytorch_model*.bin")) for tensor in _pickled(file)]
        return _summed(path, "model directory", metadata, tensors)
    if not path.is_file():
        raise UserError(f"{path} {'is no file' if path.exists() else 'does not exist'}")
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"GGUF":
        gguf = GGUF.open(path)
        tensors = [
            {"name": name, "kind": info.kind, "shape": list(info.shape), "nbytes": info.nbytes}
            for name, info in gguf.tensors.items()
        ]
        return _summed(path, f"GGUF version {gguf.version}", gguf.metadata, tensors)
    if path.suffix == ".safetensors":
        return _summed(path, "safetensors", *_safetensors(path))
    if start.startswith((b"PK\3\4", b"\x80\2")):
        return _summed(path, "PyTorch pickle", {}, _pickled(path))
    raise UserError(f"{path} is neither GGUF, safetensors nor a model directory, nor a state dict of PyTorch")


def lines_of(contents: Contents) -> Iterator[str]:
    """The same for people. What a file says can't steer a terminal: characters that don't print are escaped."""
    kinds: dict[str, int] = {}
    for tensor in contents["tensors"]:
        kinds[tensor["kind"]] = kinds.get(tensor["kind"], 0) + 1
    yield f"{contents['path']}: {contents['format']}"
    yield f"{contents['parameters']:,} numbers in {len(contents['tensors'])} tensors, {contents['nbytes']:,} bytes"
    if kinds:
        yield "kinds: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    if isinstance(contents["metadata"], dict):
        yield from (f"{printable(key)} = {_short(value)}" for key, value in contents["metadata"].items())
    for tensor in contents["tensors"]:
        yield f"{printable(tensor['name'])}  {tensor['kind']}  {tensor['shape']}"


def _safetensors(path: Path) -> tuple[dict[str, str], list[Contents]]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="np") as file:
            tensors = []
            for name in file.keys():  # noqa: SIM118 - the library's object is no mapping
                part = file.get_slice(name)
                shape, kind = part.get_shape(), part.get_dtype()
                bits = int("".join(filter(str.isdigit, kind.partition("_")[0])) or 8)  # F8_E4M3, BOOL
                tensors.append({"name": name, "kind": kind, "shape": shape, "nbytes": math.prod(shape) * bits // 8})
            return file.metadata() or {}, tensors
    except (safetensors.SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({printable(str(error), 300)})") from None


def _pickled(path: Path) -> list[Contents]:
    from leftward.formats.pickled import read_pickled  # torch

    return [
        {"name": name, "kind": _kind(str(tensor.dtype)), "shape": list(tensor.shape), "nbytes": tensor.nbytes}
        for name, tensor in read_pickled(path).items()
    ]


def _kind(dtype: str) -> str:
    """torch.bfloat16 as safetensors has it: BF16."""
    return dtype.removeprefix("torch.").replace("float", "f").replace("uint", "u").replace("int", "i").upper()


def _summed(path: Path, kind: str, metadata: Any, tensors: list[Contents]) -> Contents:
    return {
        "path": str(path),
        "format": kind,
        "parameters": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "nbytes": sum(tensor["nbytes"] for tensor in tensors),
        "metadata": metadata,
        "tensors": tensors,
    }


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value):,} values, {_short(value[:3])[:-1]}, …]"
    text = printable(value if isinstance(value, str) else str(value))
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
