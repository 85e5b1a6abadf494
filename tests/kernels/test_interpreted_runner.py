"""The way of a GPU worker with every Triton kernel that a GPU would choose, in the interpreter: the start-up check finds
each equal to its twin, and a short stream has the tokens of the plain way."""

from __future__ import annotations

from pathlib import Path

import pytest
from row_schedules import LaggedEngine, Running
from tiny_models import Driven, TinyModel, drive

from kernels import dispatch
from workers.engine.device.graphs import DirectCall
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.model.fused import FusedPass
from workers.protocol.messages import SamplingParams

pytestmark = pytest.mark.rest

NUM_TOKENS = 4
PARAMS = (
    SamplingParams(seed=1, temperature=0.0, min_tokens=9),
    SamplingParams(seed=2, top_p=0.9, presence_penalty=-3.0, ignore_eos=True),
)


@pytest.mark.parametrize(
    ("name", "is_fused"),
    [
        ("qwen3", True),
        pytest.param("gemma2", False, marks=pytest.mark.slow),
        pytest.param("mixtral", False, marks=pytest.mark.slow),
    ],
)
def test_a_runner_of_compiled_kernels_says_the_tokens_of_their_twins(
    name: str, is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TinyModel.make(name, tmp_path)
    expected = []
    for params in PARAMS:
        alone = Driven([7, 40, 90, 13, 25], params)
        drive(model.runner(), [alone], NUM_TOKENS)
        expected.append(alone.output)
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda device: choose(device, dispatch.COMPILED))
    settings = RunnerSettings(str(tmp_path), device="cpu", steps="device", num_blocks=16, max_rows=6, max_model_len=64)
    runner = ModelRunner(settings, capture=DirectCall())
    assert isinstance(runner.loaded.hidden_states, FusedPass) == is_fused
    ran = {kernel.op: kernel.state for kernel in runner.kernels if kernel.op in dispatch.COMPILED}
    unchecked = {"attention_shared", "group_rows", "lora"}
    wrong = {"linear_fp8", "quantize_tokens"}  # the interpreter's own cast to fp8 is wrong
    assert {op for op, state in ran.items() if state != "equal"} <= unchecked | wrong
    sequences = [Running([7, 40, 90, 13, 25], params, arrival=0) for params in PARAMS]
    LaggedEngine(runner, sequences, 1, 1, NUM_TOKENS).run()
    assert [sequence.output for sequence in sequences] == expected
