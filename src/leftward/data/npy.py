""".npy files that grow: what is appended is on disk, and only the header is written again at the end."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from leftward.errors import UserError


class NpyWriter:
    """An array [length, *shape] on its way to disk. Use as a context manager, or `close` it."""

    def __init__(self, path: Path, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> None:
        self._dtype = np.dtype(dtype)
        self._shape = shape
        self._length = 0
        self._file: Any = path.open("wb")
        self._header_size = self._write_header()

    def __len__(self) -> int:
        return self._length

    def append(self, values: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self._length += len(values)

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._file.seek(0)
            # numpy leaves room in a header for the length to grow.
            assert self._write_header() == self._header_size
        finally:
            self._file.close()

    def _write_header(self) -> int:
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self._length, *self._shape),
            },
        )
        size: int = self._file.tell()
        return size

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_npy(path: Path) -> NDArray[Any]:
    """The array in `path`, mapped: nothing is read before it is asked for.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: prepare the data again") from None
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}): prepare the data again") from None
    return np.asarray(mapped)  # still mapped, but without the cost of a memmap object for every slice
