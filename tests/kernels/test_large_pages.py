"""Memory that weights are put into: zeros of their own, in line, and given back."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
import weakref

import pytest
import torch

from leftward.kernels import large_pages

LARGE = 1 << 21


def test_each_has_zeros_of_its_own_and_small_ones_lie_together() -> None:
    shapes = [(3, 7, 320), (1,), (100, 544), (0, 5), (40, 18, 320), (LARGE * 20,)]
    made = [large_pages.zeros(*shape) for shape in shapes]
    for number, (shape, tensor) in enumerate(zip(shapes, made, strict=True), 1):
        assert tensor.shape == shape and tensor.dtype == torch.uint8 and tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(number)
    for number, tensor in enumerate(made, 1):
        assert (tensor == number).all()
    assert made[-1].data_ptr() % LARGE == 0
    assert all(tensor.data_ptr() % 64 == 0 for tensor in made)
    assert abs(made[4].data_ptr() - made[2].data_ptr()) < LARGE * 16


def test_threads_do_not_get_the_same() -> None:
    made: list[torch.Tensor] = []

    def take() -> None:
        for _ in range(300):
            made.append(large_pages.zeros(7, 320))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begins = sorted(tensor.data_ptr() for tensor in made)
    assert len(begins) == 1200 and min(b - a for a, b in itertools.pairwise(begins)) >= 7 * 320


def test_large_ones_are_given_back() -> None:
    pieces = []
    real = mmap.mmap

    class Watched(real):  # type: ignore[misc, valid-type]
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            large_pages.mmap, "mmap", lambda *a, **k: pieces.append(weakref.ref(it := Watched(*a, **k))) or it
        )
        tensor = large_pages.zeros(LARGE * 20)
    assert len(pieces) == 1 and pieces[0]() is not None
    del tensor
    gc.collect()
    assert pieces[0]() is None


def test_elsewhere_it_is_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(large_pages.mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(large_pages.zeros(3, 320), torch.zeros(3, 320, dtype=torch.uint8))
