"""Copies between a GPU and pinned host memory: the same bytes come back while steps run, and no step waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from gpu_runner import DEMO, runner_of

from kernels.reference.quant import bits
from workers.engine.device.runner import ModelRunner
from workers.engine.kv.offload import HostStore
from workers.engine.values.plan import Row


@pytest.fixture(autouse=True)
def as_a_runner_works() -> Iterator[None]:
    """A runner makes its KV in inference mode, and only there may it be written."""
    with torch.inference_mode():
        yield


def filled(kv_dtype: str = "auto") -> tuple[ModelRunner, HostStore, torch.Tensor]:
    runner = runner_of(DEMO, dtype="bfloat16", kv_dtype=kv_dtype)
    runner.store.randomise(100, torch.Generator("cuda").manual_seed(1))
    store = runner.host_blocks(128 * runner.store.shape.bytes_per_block)
    return runner, store, bits(runner.store.tensor).clone()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_blocks_come_back_as_they_were_when_they_were_stored(kv_dtype: str) -> None:
    runner, host, before = filled(kv_dtype)
    blocks, slots = list(range(1, 100)), [(37 * i) % 128 for i in range(99)]
    host.store(list(zip(blocks, slots, strict=True)))
    # Given to somebody else at once: the copy was asked for before.
    bits(runner.store.tensor)[:, 1:100].zero_()
    loaded = host.load(slots)
    loaded.wait()
    assert loaded.done
    host.place(loaded, blocks)
    torch.cuda.synchronize()
    assert torch.equal(bits(runner.store.tensor)[:, 1:100], before[:, 1:100])


def test_a_slot_written_again_is_read_in_the_order_of_the_calls() -> None:
    runner, host, before = filled()
    host.store([(1, 5)])
    first = host.load([5])
    host.store([(2, 5)])
    second = host.load([5])
    for loaded, block in ((first, 50), (second, 51)):
        loaded.wait()
        host.place(loaded, [block])
    torch.cuda.synchronize()
    after = bits(runner.store.tensor)
    assert torch.equal(after[:, 50], before[:, 1])
    assert torch.equal(after[:, 51], before[:, 2])


def test_bytes_of_a_slot_are_those_of_its_block_and_can_be_written() -> None:
    runner, host, before = filled()
    host.store([(3, 9)])
    host.write(10, host.read(9))
    loaded = host.load([10])
    loaded.wait()
    host.place(loaded, [60])
    torch.cuda.synchronize()
    assert torch.equal(bits(runner.store.tensor)[:, 60], before[:, 3])


def test_a_step_does_not_wait_for_a_load() -> None:
    """Behind a copy stream that stands still, steps go on, and the load is not done."""
    runner, host, _ = filled()
    host.store([(1, 1)])
    torch.cuda.synchronize()
    assert host._stream is not None
    with torch.cuda.stream(host._stream):
        torch.cuda._sleep(2_000_000_000)
    loaded = host.load([1])
    runner.execute([Row([1, 2, 3], 0, [101])])
    assert not loaded.done
    loaded.wait()
    assert loaded.seconds < 1.0


def test_the_host_does_not_wait_for_the_launched_steps_to_store_and_place() -> None:
    """The steps of the current stream stand still for about a second."""
    _, host, before = filled()
    host.store([(1, 1)])
    warm, loaded = host.load([1]), host.load([1])
    loaded.wait()
    host.place(warm, [50])
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    began = time.perf_counter()
    host.store([(1, 1)])
    host.place(loaded, [51])
    assert time.perf_counter() - began < 0.1
    torch.cuda.synchronize()
    assert torch.equal(bits(host._store.tensor)[:, 51], before[:, 1])
