"""Host memory for KV blocks where torch's streams and pinned memory are scripted: what a store that fails leaves behind,
which memory is given back, and that the host never waits for the device to tell it block ids."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kernels import dispatch
from workers.engine.kv import offload
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.kv.offload import STAGED_BLOCKS, HostStore, Staging
from workers.engine.values.errors import DeviceOutOfMemory, ModelError

CPU = torch.device("cpu")


def store_of(num_blocks: int, dtype: torch.dtype = torch.float32) -> KVStore:
    return KVStore(KVShape(1, 1, 16, 4, dtype), num_blocks, CPU, dispatch.choose(CPU))


class Event:
    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """A stream on which nothing has happened yet: whoever needs its copies has to wait for an event."""
    made: list[Event] = []

    def now() -> Event:
        made.append(Event())
        return made[-1]

    monkeypatch.setattr(offload, "_now", now)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return made


def test_whoever_uses_a_slot_waits_for_the_part_of_a_failed_store_that_has_begun(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(STAGED_BLOCKS + 2)
    host = HostStore(store, dispatch.choose(CPU), CPU, 100 * store.shape.bytes_per_block)
    host._stream = SimpleNamespace(wait_stream=lambda _: None)
    real, sizes = Staging, list[int]()

    def staging(store: KVStore, num_blocks: int, device: torch.device) -> Staging:
        sizes.append(num_blocks)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError("full")
        return real(store, num_blocks, device)

    monkeypatch.setattr(offload, "Staging", staging)
    with pytest.raises(DeviceOutOfMemory):
        host.store([(number, number) for number in range(1, STAGED_BLOCKS + 2)])
    assert sizes == [STAGED_BLOCKS, 1]
    host.write(1, bytes(store.shape.bytes_per_block))
    assert events[-1].num_waits == 1


def test_a_block_is_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(4)
    host = HostStore(store, dispatch.choose(CPU), CPU, 4 * store.shape.bytes_per_block)
    host.store([(1, 0), (2, 1)])
    monkeypatch.setattr(dispatch.Ops, "_looks_into", lambda *_: False)  # as for ids on a device
    with pytest.raises(AssertionError, match="written twice"):
        host.place(host.load([0, 1]), [3, 3])


@pytest.mark.parametrize("refused", [0, 2])
def test_pinned_memory_is_given_back_before_it_is_freed(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, unpinned = list[int](), list[int]()

    def register(pointer: int, size: int, flags: int) -> int:
        pinned.append(pointer)
        return int(len(pinned) == refused)

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unpinned.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    if refused:
        with pytest.raises(ModelError, match="cannot be pinned"):
            Staging(store_of(2, torch.int8), 2, CPU, pinned=True)
    else:
        staging = Staging(store_of(2, torch.int8), 2, CPU, pinned=True)
        assert len(pinned) == 2 and unpinned == []
        del staging
    gc.collect()
    assert sorted(unpinned) == sorted(pinned[: 1 if refused else 2])
