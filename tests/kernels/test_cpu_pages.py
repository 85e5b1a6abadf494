"""Large pages hold what they were given, and are let go with it."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from kernels.pages import SIZE, in_large_pages

LARGE = (3, SIZE // 4 + 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_begins_at_a_page_and_holds_the_same(dtype: torch.dtype) -> None:
    tensor = torch.randn(LARGE).to(dtype)
    copy = in_large_pages(tensor)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()
    assert copy.data_ptr() % SIZE == 0
    assert copy.data_ptr() != tensor.data_ptr()


def test_what_is_smaller_than_a_page_stays_where_it_is() -> None:
    tensor = torch.ones(SIZE // 4 - 1)
    assert in_large_pages(tensor) is tensor


def test_without_such_pages_the_tensor_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    tensor = torch.ones(LARGE)
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", Refusing)
        assert in_large_pages(tensor) is tensor
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert in_large_pages(tensor) is tensor


@pytest.mark.rest
def test_memory_goes_with_its_last_view() -> None:
    copy = in_large_pages(torch.ones(32 * SIZE // 4))
    address, view = copy.data_ptr(), copy[1:]
    del copy
    gc.collect()
    assert is_mapped(address)
    assert view.sum() == view.numel()
    del view
    gc.collect()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(first <= address < end for first, end in map(bounds, ranges))


def bounds(found: str) -> tuple[int, int]:
    first, _, end = found.partition("-")
    return int(first, 16), int(end, 16)
