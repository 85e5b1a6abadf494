"""The fused Llama pass computes what the layers compute one operation at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import Driven, TinyModel, drive

from kernels import dispatch
from kernels.dispatch import TWINS
from workers.engine.device.graphs import DirectCall
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.model.fused import FusedPass

TinyModels = Callable[[str], TinyModel]
FUSED = ("rms_norm", "rope_kv_write", "silu_mul")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, dispatch.Kernel]:
    """Ops that are not their twins, though they compute the same: what a GPU would choose."""
    kernels: dict[str, dispatch.Kernel] = {}
    for name in FUSED:
        kernels[name] = lambda *args, name=name: TWINS[name](*args)
    ops = dispatch.Ops(torch.device("cpu"), dict(TWINS) | kernels)
    monkeypatch.setattr(dispatch, "choose", lambda device: ops)
    return kernels


def runner_of(directory: Path, **settings: object) -> ModelRunner:
    given = {"num_blocks": 48, "block_size": 4, "device": "cpu"} | settings
    return ModelRunner(RunnerSettings(str(directory), **given), capture=DirectCall())


@pytest.mark.parametrize("steps", ["plain", "device"])
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen2", "qwen3", "mistral"])
def test_the_family_takes_the_fused_pass_and_says_the_same_tokens(
    tiny_model: TinyModels, compiled: dict[str, dispatch.Kernel], name: str, steps: str
) -> None:
    model = tiny_model(name)
    runner = runner_of(model.directory, steps=steps)
    assert isinstance(runner.loaded.hidden_states, FusedPass)
    sequence = Driven(list(range(20, 40)))
    drive_with_rows(runner, sequence, 20)
    ids = torch.tensor([sequence.prompt])
    expected = model.reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    assert sequence.output == expected[0, 20:].tolist()


def drive_with_rows(runner: ModelRunner, sequence: Driven, num_tokens: int) -> None:
    """`drive` gives no device rows; a sequence alone may have any."""
    true_row = sequence.row

    def row(chunk: int) -> object:
        from dataclasses import replace

        return replace(true_row(chunk), row_id=3)

    sequence.row = row
    drive(runner, [sequence], num_tokens, chunk=7)


def test_other_models_keep_their_own_pass(tiny_model: TinyModels, compiled: dict[str, dispatch.Kernel]) -> None:
    runner = runner_of(tiny_model("gemma2").directory)
    assert not isinstance(runner.loaded.hidden_states, FusedPass)


def test_a_fused_layer_that_differs_leaves_all_unfused(
    tiny_model: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    compiled: dict[str, dispatch.Kernel],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("workers.engine.model.fused.rope_table", lambda *_: torch.ones(256, 64))
    with caplog.at_level(logging.WARNING):
        runner = runner_of(tiny_model("llama").directory)
    assert "the layers stay unfused: layer 0 is off by" in caplog.text
    assert not isinstance(runner.loaded.hidden_states, FusedPass)
