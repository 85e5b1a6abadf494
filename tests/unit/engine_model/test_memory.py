"""The arithmetic of KV memory, and the steps it is measured with."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import GREEDY, Driven, TinyModel, drive

from workers.engine.device.graphs import DirectCall
from workers.engine.device.memory import Largest, measure, refuse_large_weights, warm_up
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.kv import kv_store
from workers.engine.sampling.processors import needs_processing
from workers.engine.sizing.capacity import MemoryPlan, Need
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row, SampleSpec
from workers.engine.values.sampling_params import penalizes
from workers.process.free_memory import free_memory

GIB = 2**30
PLAN = MemoryPlan(80 * GIB, 0.9, 20 * GIB, 3 * GIB, GIB)


def test_kv_gets_what_the_other_terms_leave_of_the_share() -> None:
    assert PLAN.kv == 48 * GIB
    need = Need(19 * GIB, 2 << 20, 16, 16)
    assert need.num_blocks(PLAN.kv, 10**9) == 24 * 1024
    assert need.num_blocks(PLAN.kv, 100) == 100
    assert PLAN.terms() == ("90% of 80.00 GiB - 20.00 used - 3.00 for a step - 1.00 for recorded steps = 48.00 GiB")


def test_no_room_is_one_sentence_with_the_numbers() -> None:
    plan = MemoryPlan(80 * GIB, 0.9, 71 * GIB + GIB // 2, GIB, 0)
    need = Need(70 * GIB, 1 << 20, 16, 4096)
    with pytest.raises(ModelError) as refused:
        need.num_blocks(plan.kv, 10**9, plan.terms())
    assert str(refused.value) == (
        "The model does not fit: it needs 70.00 GiB for weights and 0.31 GiB for one sequence of 4096 tokens and the"
        " pinned blocks, and has 69.50 GiB (90% of 80.00 GiB - 71.50 used - 1.00 for a step - 0.00 for recorded steps = -0.50 GiB)."
    )


def test_weights_that_are_larger_than_the_free_memory_are_refused_before_they_are_read() -> None:
    with pytest.raises(ModelError, match=r"needs 1048576.00 GiB for weights, and has .* GiB \(the"):
        refuse_large_weights(1 << 50, torch.device("cpu"), 0.9, 1)
    refuse_large_weights(1, torch.device("cpu"), 0.9, 1)


def test_a_worker_in_a_container_plans_with_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for path, content in (
        (tmp_path / "proc/meminfo", f"MemAvailable: {200 << 20} kB\n"),
        (tmp_path / "proc/self/cgroup", "0::/\n"),
        (group / "memory.max", f"{4 * GIB}\n"),
        (group / "memory.current", f"{2 * GIB}\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(kv_store, "free_memory", partial(free_memory, tmp_path))
    assert kv_store.plan_num_blocks(Need(GIB, 1 << 20, 16, 16), torch.device("cpu"), 1 << 20) == 2 * 1024 // 10
    refuse_large_weights(2 * GIB, torch.device("cpu"), 0.9, 1)
    with pytest.raises(ModelError, match=r"has 2\.00 GiB"):
        refuse_large_weights(2 * GIB + 1, torch.device("cpu"), 0.9, 1)


def test_on_a_gpu_weights_may_take_the_share_that_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    refuse_large_weights(62 * GIB, torch.device("cuda"), 0.9, 1)
    with pytest.raises(ModelError, match=r"has 62.00 GiB \(90% of 80.00 GiB less what others use"):
        refuse_large_weights(62 * GIB + 1, torch.device("cuda"), 0.9, 1)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "max_model_len"),
    [(512, 256, 4096), (8192, 16, 1000), (100, 100, 50), (7, 3, 4), (512, 1, 64)],
)
def test_the_largest_steps_are_as_large_as_steps_can_be(num_tokens: int, num_rows: int, max_model_len: int) -> None:
    largest = Largest(num_tokens, num_rows, max_model_len, 16)
    many, (one,) = largest.many_rows(), largest.one_row()
    assert len(many) == min(num_rows, num_tokens)
    assert sum(len(row.tokens) for row in many) <= num_tokens
    assert len(one.tokens) == min(num_tokens, max_model_len - 1)
    blocks = [block for row in many for block in row.block_table]
    assert len(set(blocks)) == len(blocks)
    for row in (*many, one):
        assert 0 < len(row.tokens) <= min(16 * len(row.block_table), max_model_len - 1)
        assert max(row.block_table) < largest.num_blocks()
        assert row.draws[0].position == len(row.tokens)
        assert needs_processing(row.draws[0]) and penalizes(row.draws[0].params)
    assert {row.row_id for row in many} == set(range(len(many)))


def test_the_largest_steps_are_run_and_their_store_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a device that tells made-up figures of its memory."""
    model = TinyModel.make("llama", tmp_path)
    settings = RunnerSettings(str(tmp_path), device="cpu", steps="device", num_blocks=8, block_size=4, max_rows=6)
    runner = ModelRunner(settings, capture=DirectCall())
    steps, launched = runner._steps, []
    true_launch = steps.launch
    monkeypatch.setattr(steps, "launch", lambda rows: launched.append(rows) or true_launch(rows))
    peaks = iter((5 << 20, 7 << 20))
    for name, answer in {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device: 1 << 20,
        "max_memory_allocated": lambda device: next(peaks),
        "mem_get_info": lambda device: (60 << 20, 100 << 20),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    largest = Largest(40, 6, 64, 4)
    need = Need(1 << 20, runner.store.shape.bytes_per_block, 4, 64)
    with torch.inference_mode():
        number = measure(runner.store, torch.device("cpu"), 0.9, largest, steps, 1, need)
    left = (90 << 20) - (40 << 20) - (6 << 20) - ((6 << 20) + (4 << 20))
    assert number == min(left // runner.store.shape.bytes_per_block, 1 + 256 * 16)
    assert [len(rows) for rows in launched] == [6, 1]
    assert runner.store.tensor.numel() == 0
    runner.store.resize(8)
    with torch.inference_mode():
        warm_up(runner.store, largest, steps)  # too few blocks: nothing is run
        assert len(launched) == 2
        runner.store.resize(largest.num_blocks())
        warm_up(runner.store, largest, steps)
    assert len(launched) == 4
    # Nothing of it is left: the next row starts from nothing.
    alone = Driven([5, 6, 7, 8])
    drive(model.runner(), [alone], 1)
    draw = SampleSpec(GREEDY, 0, 4, alone.prompt, ())
    (result,) = runner.execute([Row(alone.prompt, 0, [3], (draw,), row_id=1)])
    assert [d.token for d in result.drawn] == alone.output
