"""The runner on a GPU: recorded steps are called steps bit for bit, and the tokens are those of a CPU.

Tolerances. float32: tokens equal, the demo model's best two logits being far apart but for ties that both break alike.
bfloat16: mean difference of a prompt's logprobs from float32 at most twice what a CPU's bfloat16 shows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from gpu_runner import DEMO, runner_of
from row_schedules import MAX_ROWS, NUM_TOKENS, LaggedEngine, Running, sequences_of
from tiny_models import CONFIGS, Driven, TinyModel, drive

from workers.engine.device.runner import ModelRunner
from workers.engine.values.errors import DeviceOutOfMemory
from workers.engine.values.layout import Thinned
from workers.engine.values.plan import Row, SampleSpec
from workers.engine.values.probe import AttentionMass
from workers.protocol.messages import SamplingParams

PROMPTS = [list(range(40 + 11 * i, 40 + 11 * i + 9 + 7 * i)) for i in range(5)]
GREEDY = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def cleaned() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def greedy_sequences() -> list[Running]:
    return [
        Running(list(prompt), msgspec.structs.replace(GREEDY, seed=i), arrival=i) for i, prompt in enumerate(PROMPTS)
    ]


def run(runner: ModelRunner, sequences: Sequence[Running], seed: int, lag: int) -> list[list[int]]:
    LaggedEngine(runner, sequences, seed, lag).run()
    return [sequence.output for sequence in sequences]


def no_difference(caplog: pytest.LogCaptureFixture) -> None:
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_step_is_the_called_step_bit_for_bit(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """At start for every size, and at every step of a schedule with chunks, arrivals and preemptions."""
    with caplog.at_level(logging.INFO, "workers.engine"):
        runner = runner_of(DEMO, dtype=dtype, graphs="check")
        assert "4 of 4 decode steps recorded" in caplog.text
        run(runner, sequences_of(9), 1, 1)
    no_difference(caplog)


def test_no_kernel_gave_its_place_to_its_twin() -> None:
    runner = runner_of(DEMO)
    assert {kernel.op for kernel in runner.kernels if kernel.state == "differs"} == set()
    assert {kernel.state for kernel in runner.kernels if kernel.implementation == "triton"} <= {"equal", "unchecked"}


def test_greedy_tokens_of_the_demo_model_are_those_of_a_cpu() -> None:
    expected = []
    cpu = runner_of(DEMO, "cpu", num_blocks=64)
    for prompt in PROMPTS:
        alone = Driven(list(prompt), GREEDY)
        drive(cpu, [alone], NUM_TOKENS)
        expected.append(alone.output)
    assert run(runner_of(DEMO), greedy_sequences(), 2, 1) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_of_every_kind_of_model_are_those_of_a_cpu(name: str, tmp_path: Path) -> None:
    """Models that transformers runs are recorded too, or say why not and are called."""
    model = TinyModel.make(name, tmp_path)
    alone = Driven(PROMPTS[2], GREEDY)
    drive(model.runner(num_blocks=64), [alone], NUM_TOKENS)
    runner = runner_of(model.directory, block_size=16)
    sequence = Running(list(PROMPTS[2]), GREEDY, arrival=0)
    assert run(runner, [sequence], 3, 1) == [alone.output]


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_rounded_experts_are_recorded_and_give_the_tokens_of_a_cpu(
    quant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TinyModel.make("mixtral", tmp_path)
    alone = Driven(PROMPTS[2], GREEDY)
    drive(model.runner(num_blocks=64, quant=quant), [alone], NUM_TOKENS)
    with caplog.at_level(logging.INFO, "workers.engine"):
        runner = runner_of(model.directory, block_size=16, quant=quant)
        assert "4 of 4 decode steps recorded" in caplog.text
    sequence = Running(list(PROMPTS[2]), GREEDY, arrival=0)
    assert run(runner, [sequence], 3, 1) == [alone.output]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_row_without_some_blocks_is_the_one_of_a_cpu(kv_dtype: str) -> None:
    # One number of the KV that is rounded to the next step of 8 bits moves a logprob by 0.014.
    tolerance = 2e-3 if kv_dtype == "auto" else 2e-2
    found = []
    for device in ("cuda", "cpu"):
        runner = runner_of(DEMO, device, num_blocks=16, block_size=16, kv_dtype=kv_dtype, sparse=True)
        assert runner.lag == 0
        tokens = list(range(40, 120))
        (whole,) = runner.execute([Row(tokens, 0, [1, 2, 3, 4, 5], probe=AttentionMass(16))])
        (cut,) = runner.execute([Row(tokens[:9], 80, [1, 4, 5, 6], prompt_logprobs=0, layout=Thinned(32))])
        found.append((*whole.probed, *(token.logprob for token in cut.prompt_logprobs)))
    assert found[0] == pytest.approx(found[1], abs=tolerance)


def test_one_step_of_lag_changes_no_token() -> None:
    runner = runner_of(DEMO)
    behind = run(runner, sequences_of(9), 4, 1)
    assert run(runner, sequences_of(9), 4, 0) == behind
    assert run(runner_of(DEMO, graphs="off"), sequences_of(9), 5, 1) == behind


def test_logprobs_in_bfloat16_are_as_near_to_float32_as_on_a_cpu() -> None:
    prompt = [3 + 7 * i % 500 for i in range(200)]
    row = Row(prompt, 0, list(range(1, 14)), prompt_logprobs=0, row_id=0)

    def logprobs(device: str, dtype: str) -> torch.Tensor:
        (result,) = runner_of(DEMO, device, dtype=dtype).execute([row])
        return torch.tensor([entry.logprob for entry in result.prompt_logprobs])

    exact = logprobs("cpu", "float32")
    torch.testing.assert_close(logprobs("cuda", "float32"), exact, atol=2e-3, rtol=0)
    cpu_error = (logprobs("cpu", "bfloat16") - exact).abs().mean()
    assert (logprobs("cuda", "bfloat16") - exact).abs().mean() <= 2 * cpu_error + 1e-3


def test_a_step_out_of_memory_is_survived() -> None:
    """A prompt that does not fit beside what is reserved; the stream beside it goes on with the tokens it has alone."""
    runner = runner_of(DEMO, num_blocks=1024)
    alone, watched = Driven(PROMPTS[1], GREEDY), Driven(PROMPTS[1], GREEDY)
    drive_rows(runner, alone, 12)
    drive_rows(runner, watched, 6)
    limit = min(runner.max_model_len - 1, 8000)
    rows = [
        Row([5] * limit, 0, list(range(50, 50 - (-limit // 16))), (draw_of(limit),), row_id=i)
        for i in range(1, MAX_ROWS)
    ]
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.memory_reserved() + (4 << 20)
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    with pytest.raises(DeviceOutOfMemory):
        runner.launch(rows)
    torch.cuda.set_per_process_memory_fraction(1.0)
    drive_rows(runner, watched, 12)
    assert watched.output == alone.output


def test_kv_takes_what_the_largest_step_leaves_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "workers.engine"):
        runner = runner_of(DEMO, num_blocks=None, memory_share=0.3, max_batch_tokens=2048)
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "kv_planned"]
    assert runner.num_blocks == record.num_blocks
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.3 * total + (256 << 20)
    run(runner, sequences_of(9), 6, 1)


def draw_of(position: int) -> SampleSpec:
    return SampleSpec(GREEDY, 0, position, (), ())


def drive_rows(runner: ModelRunner, sequence: Driven, num_tokens: int) -> None:
    """Alone, without lag, in device row 0."""
    sequence.table = list(range(1, 9))
    while len(sequence.output) < num_tokens:
        tokens = [*sequence.prompt, *sequence.output]
        draw = SampleSpec(GREEDY, 0, len(tokens), sequence.prompt, sequence.output)
        start = sequence.num_written
        (result,) = runner.execute([Row(tokens[start:], start, sequence.table, (draw,), row_id=0)])
        sequence.num_written = len(tokens)
        sequence.output.append(result.drawn[0].token)
