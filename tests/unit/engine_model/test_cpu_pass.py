"""The pass of a CPU worker computes what transformers computes layer by layer, in float32 and over 16-bit weights."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from tiny_models import Driven, TinyModel, drive

from workers.engine.layers import linear
from workers.engine.model import cpu_pass
from workers.engine.model.cpu_pass import CpuPass
from workers.engine.plan import Draw, Row
from workers.engine.runner import ModelRunner
from workers.protocol.messages import SamplingParams

TinyModels = Callable[[str], TinyModel]
FAMILY = ["llama", "llama-tied-biased", "qwen2", "qwen3", "mistral"]
PROMPT = list(range(20, 45))


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_takes_it_and_says_the_tokens_of_transformers(
    tiny_model: TinyModels, name: str
) -> None:
    model = tiny_model(name)
    runner = model.runner()
    assert isinstance(runner.loaded.hidden_states, CpuPass)
    sequence = Driven(PROMPT)
    drive(runner, [sequence], 20)
    ids = torch.tensor([PROMPT])
    expected = model.reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        min_new_tokens=20,
        do_sample=False,
    )
    assert sequence.output == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", FAMILY)
def test_over_16_bit_weights_it_is_nearer_to_float32_than_a_pass_in_bfloat16(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Against transformers in float32 with the very weights that bfloat16 leaves."""
    model = tiny_model(name)
    monkeypatch.setattr(linear, "widens", lambda dtype: False)
    narrow = last_logits(model.runner(dtype="bfloat16"))
    widened(monkeypatch)
    runner = model.runner(dtype="bfloat16")
    own = runner.loaded.hidden_states
    assert isinstance(own, CpuPass) and own.dtype == torch.float32
    assert runner.loaded.min_tokens == 1
    for weight in model.reference.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()
    exact = model.reference(torch.tensor([PROMPT])).logits[0, -1]
    assert (last_logits(runner) - exact).norm() < (narrow - exact).norm()


def test_a_row_has_the_same_bits_alone_and_beside_others(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    widened(monkeypatch)
    runner = tiny_model("qwen3").runner(dtype="bfloat16")
    alone, beside = Driven(PROMPT), Driven(PROMPT)
    drive(runner, [alone], 12)
    drive(runner, [Driven(PROMPT[3:9]), beside, Driven(PROMPT[::-1])], 12)
    assert alone.output == beside.output


def test_a_layer_that_differs_leaves_the_model_to_transformers(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_pass, "_difference", lambda *_: 0.5)
    with caplog.at_level(logging.WARNING):
        runner = tiny_model("llama").runner()
    assert not isinstance(runner.loaded.hidden_states, CpuPass)
    assert "layer 0 is off by" in caplog.text


def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without instructions for bfloat16, whichever this is."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no FBGEMM")
    monkeypatch.setattr(linear, "widens", lambda dtype: dtype != torch.float32)


def last_logits(runner: ModelRunner) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    sampler = runner.loaded.sampler
    draw = sampler.draw
    sampler.draw = lambda logits, draws: seen.append(logits) or draw(logits, draws)
    table = list(range(1, 1 + len(PROMPT)))
    greedy = Draw(SamplingParams(seed=0, temperature=0.0), 0, len(PROMPT), PROMPT, [])
    runner.execute([Row(PROMPT, 0, table, (greedy,))])
    return seen[0][0]
