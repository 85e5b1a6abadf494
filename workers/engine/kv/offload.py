"""Host memory for copies of KV blocks. It implements `host_port.HostBlocks` for a KV store, on a CPU and on a GPU.

On a GPU host memory is pinned, and copies run on a separate stream, in parallel with the steps. A store gathers on the stream
of the steps, after what was launched there, and is copied from the gathered tensor. A load is copied into staging, and
only `place` scatters it, so that no step ever waits for a copy. On a CPU every copy is done when the call returns.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from kernels.dispatch import Ops
from kernels.reference.quant import bits
from workers.engine.kv.kv_store import KVStore, available_bytes
from workers.engine.kv.transport import upload
from workers.engine.values.errors import DeviceOutOfMemory, ModelError
from workers.engine.values.host_port import Pairs, Transfer

STAGED_BLOCKS = 64
"""Number of blocks gathered at a time; it bounds the device memory that copies take."""

T = TypeVar("T")


class Landed:
    """A finished transfer, with the staging that it filled."""

    done = True

    def __init__(self, seconds: float, staging: Staging | None = None) -> None:
        self.seconds = seconds
        self.staging = staging

    def wait(self) -> None:
        pass


class Flying:
    """A transfer on a GPU's own stream."""

    def __init__(self, begun: torch.cuda.Event, ended: torch.cuda.Event, staging: Staging | None = None) -> None:
        self.begun, self._ended, self.staging = begun, ended, staging

    @property
    def done(self) -> bool:
        done: bool = self._ended.query()
        return done

    @property
    def seconds(self) -> float:
        milliseconds: float = self.begun.elapsed_time(self._ended)
        return milliseconds / 1000

    def wait(self) -> None:
        self._ended.synchronize()


class Staging:
    """Packed blocks `[n, num_layers, 2, KVH, block_size, D]`, and their scales if they are 8-bit."""

    def __init__(self, store: KVStore, num_blocks: int, device: torch.device, *, pinned: bool = False):
        shape = (num_blocks, store.shape.num_layers, *store.tensor.shape[2:])
        self.kv = torch.empty(shape, dtype=store.shape.dtype, device=device)
        self.scales = None if store.scales is None else torch.empty(shape[:-1], device=device)
        if pinned:
            for tensor in self.tensors:
                self._pin(tensor)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [bits(self.kv)] if self.scales is None else [bits(self.kv), self.scales]

    def _pin(self, tensor: torch.Tensor) -> None:
        """Registers the memory, and has it given back before it is freed. It is not allocated as pinned, because that
        allocator rounds up to a power of two."""
        cuda, size = torch.cuda.cudart(), tensor.numel() * tensor.element_size()
        if int(cuda.cudaHostRegister(tensor.data_ptr(), size, 0)):
            raise ModelError(f"{size} bytes of host memory cannot be pinned.")
        weakref.finalize(self, cuda.cudaHostUnregister, tensor.data_ptr())


class HostStore:
    def __init__(self, store: KVStore, ops: Ops, device: torch.device, num_bytes: int) -> None:
        """Takes `num_bytes` of host memory. Raises ModelError if that is too little for a block or more than is
        available."""
        shape = store.shape
        self.bytes_per_slot = shape.bytes_per_block
        self.layout = f"{shape.num_layers} layers, {shape.num_kv_heads} heads of {shape.head_dim}, {shape.dtype}"
        self.num_slots = num_bytes // self.bytes_per_slot
        if not self.num_slots:
            raise ModelError(f"A host cache of {num_bytes} bytes holds no block of {self.bytes_per_slot}.")
        if num_bytes > available_bytes():
            raise ModelError(f"There is no memory for a host cache of {num_bytes} bytes.")
        self._store, self._ops, self._device = store, ops, device
        self._on_cuda = device.type == "cuda"
        self._host = Staging(store, self.num_slots, torch.device("cpu"), pinned=self._on_cuda)
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None
        self._last_store: Transfer = Landed(0.0)

    def store(self, pairs: Pairs) -> Transfer:
        return self._guarded(lambda: self._store_all(pairs))

    def load(self, slots: Sequence[int]) -> Transfer:
        return self._guarded(lambda: self._load(slots))

    def place(self, loaded: Transfer, blocks: Sequence[int]) -> None:
        self._guarded(lambda: self._place(loaded, blocks))

    def read(self, slot: int) -> bytes:
        self._last_store.wait()
        return b"".join(_octets(t[slot]).numpy().tobytes() for t in self._host.tensors)

    def write(self, slot: int, data: bytes | memoryview) -> None:
        if len(data) != self.bytes_per_slot:
            raise ValueError(f"{len(data)} bytes for a slot of {self.bytes_per_slot}")
        self._last_store.wait()  # the last store may still write to this slot
        start, given = 0, memoryview(data)
        for tensor in self._host.tensors:
            target = _octets(tensor[slot]).numpy().data
            target[:] = given[start : start + len(target)]
            start += len(target)

    def _guarded(self, run: Callable[[], T]) -> T:
        with torch.inference_mode():
            try:
                if not self._on_cuda:
                    return run()
                with torch.cuda.device(self._device):
                    return run()
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
        raise DeviceOutOfMemory(reason)

    # --- device to host ---

    def _store_all(self, pairs: Pairs) -> Transfer:
        begun_at, flying = time.perf_counter(), None
        for start in range(0, len(pairs), STAGED_BLOCKS):
            part = sorted(pairs[start : start + STAGED_BLOCKS], key=lambda pair: pair[1])
            blocks, slots = [block for block, _ in part], [slot for _, slot in part]
            staging = Staging(self._store, len(part), self._device)
            self._ops.gather_blocks(
                staging.kv, self._store.tensor, self._ids(blocks), staging.scales, self._store.scales
            )
            if self._stream is None:
                self._to_host(staging, slots)
                continue
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                begun = flying.begun if flying is not None else _now()
                self._to_host(staging, slots)
                # A later part may fail: whoever reads or writes a slot waits for what has begun.
                self._last_store = flying = Flying(begun, _now())
            # The allocator may give staging to a later step only once the copy is through.
            for tensor in staging.tensors:
                tensor.record_stream(self._stream)
        return flying or Landed(time.perf_counter() - begun_at)

    def _to_host(self, staging: Staging, slots: list[int]) -> None:
        for host, packed in zip(self._host.tensors, staging.tensors, strict=True):
            for first, slot, length in _runs(slots):
                host[slot : slot + length].copy_(packed[first : first + length], non_blocking=self._on_cuda)

    # --- host to device ---

    def _load(self, slots: Sequence[int]) -> Transfer:
        begun_at = time.perf_counter()
        if self._stream is None:
            staging = self._from_host(slots)
            return Landed(time.perf_counter() - begun_at, staging)
        # The staging belongs to this stream, so that it waits for none of the launched steps.
        with torch.cuda.stream(self._stream):
            begun = _now()
            staging = self._from_host(slots)
            return Flying(begun, _now(), staging)

    def _from_host(self, slots: Sequence[int]) -> Staging:
        staging = Staging(self._store, len(slots), self._device)
        for host, packed in zip(self._host.tensors, staging.tensors, strict=True):
            for first, slot, length in _runs(slots):
                packed[first : first + length].copy_(host[slot : slot + length], non_blocking=self._on_cuda)
        return staging

    def _place(self, loaded: Transfer, blocks: Sequence[int]) -> None:
        assert isinstance(loaded, Landed | Flying)
        staging = loaded.staging
        assert loaded.done, "placed before it arrived"
        assert staging is not None, "it brought nothing"
        if self._on_cuda:
            for tensor in staging.tensors:
                tensor.record_stream(torch.cuda.current_stream(self._device))
        assert len(set(blocks)) == len(blocks), "a block is written twice"
        self._ops.scatter_blocks(self._store.tensor, staging.kv, self._ids(blocks), self._store.scales, staging.scales)

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return upload(self._device, array("i", blocks))[0].long()


def _now() -> torch.cuda.Event:
    """Returns an event that was recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(-1)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first index, first slot, length) of each run of adjacent slots; each run is one copy."""
    breaks = [i for i, (a, b) in enumerate(pairwise(slots), 1) if b != a + 1]
    for first, end in pairwise((0, *breaks, len(slots))):
        yield first, slots[first], end - first
