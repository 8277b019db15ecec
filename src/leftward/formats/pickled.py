"""Reading the state dicts that torch.save wrote (pytorch_model.bin). Never writing them.

A pickle is a program. Its instructions are read before anything follows them, and one that asks for more than tensors
in a dict is refused; `torch.load(weights_only=True)`, which runs no code of the file's either, then makes the tensors.
What a small file can claim is bounded by its size: no tensor is larger than its bytes, and nothing is compressed.
"""

from __future__ import annotations

import math
import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from leftward.errors import UserError, printable

_ALLOWED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor(_v[23])?|parameter)"
    r"|torch(\.cuda|\.storage)? \w+Storage|torch (b?float|u?int)\d+\w*"
)
_DEEPEST = 4  # tuples in tuples: a tensor's arguments hold its sizes
_PICKLES = 5  # of a file from before PyTorch 1.6: a mark, a version, the writer's types, the state dict, its storages


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, mapped from the file where it is a zip archive (PyTorch 1.6 and later).

    Raises:
        UserError: the file is missing or damaged, asks for anything but tensors, or holds something else.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        is_archive = _check_instructions(path)
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except UserError:
        raise
    except Exception as error:  # of each layer that a damaged file can come to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is damaged or no state dict of PyTorch ({printable(reason)})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is no state dict: it holds {type(content).__name__}, not a dict of tensors")
    return _checked(path, content)


def _check_instructions(path: Path) -> bool:
    """Whether the file is a zip archive. Raises: UserError, of what it asks for; ValueError, LookupError: damaged."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            file.seek(0)
            for _ in range(_PICKLES):
                _check_pickle(path, file)
            return False
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise UserError(f"{path} is no state dict of PyTorch: its archive is compressed")
        names = [member.filename for member in members]
        programs = [name for name in names if name.endswith("/data.pkl")]
        if len(programs) != 1 or len(set(names)) < len(names):
            raise ValueError("its archive is not one of PyTorch's")
        with archive.open(programs[0]) as pickle:
            _check_pickle(path, pickle)
    return True


def _check_pickle(path: Path, file: IO[bytes]) -> None:
    """Follows what each instruction does to the stack, for how deep its tuples are nested: hashing one that holds
    another twice, and that the same, and so on sixty times, would take for ever."""
    depths: list[Any] = []  # of the values on the stack; None is a mark
    memo: dict[Any, int] = {}
    texts: list[str] = []
    for operation, argument, _ in pickletools.genops(file):
        needed, taken = operation.stack_before, []
        if pickletools.markobject in needed:
            while (depth := depths.pop()) is not None:
                taken.append(depth)
            needed = needed[: needed.index(pickletools.markobject)]
        taken += [depths.pop() for _ in needed]
        match operation.name:
            case "GLOBAL" | "INST" if not _ALLOWED.fullmatch(str(argument)):
                raise _asks_for(path, str(argument))
            case "STACK_GLOBAL":
                raise _asks_for(path, " ".join(texts[-2:]))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = depths[-1]
            case "BINGET" | "LONG_BINGET":
                depths.append(memo[argument])
            case "MARK":
                depths.append(None)
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                depths.append(1 + max(taken, default=0))
                if depths[-1] > _DEEPEST:
                    raise ValueError("it nests tuples as no state dict does")
            case _:
                depths += [0] * len(operation.stack_after)
        if isinstance(argument, str):
            texts = [*texts[-1:], argument]


def _asks_for(path: Path, what: str) -> UserError:
    asked = printable(what.replace(" ", "."))
    return UserError(f"{path} is refused: its pickle asks for {asked}, and a state dict asks for tensors only")


def _checked(path: Path, content: dict[Any, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    left = 2 * path.stat().st_size  # a head that is tied to the embedding may be there under both names
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            key, kind = printable(repr(name)), type(tensor).__name__
            raise UserError(f"{path} is no state dict: {key} is {kind}; expected names and tensors")
        tensor = tensor.detach()
        storage, nbytes = tensor.untyped_storage(), math.prod(tensor.shape) * tensor.itemsize
        left -= nbytes
        if nbytes > storage.nbytes() or left < 0:
            raise UserError(
                f"{path} is damaged: tensor {printable(name)} has shape {list(tensor.shape)}, which its bytes are too "
                "few for"
            )
        # Two parameters that are one in the file would be trained as one.
        tensors[name] = tensor.clone() if storage.data_ptr() in storages else tensor
        storages.add(storage.data_ptr())
    return tensors
