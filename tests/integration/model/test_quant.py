"""Models whose linear layers are rounded at load, against transformers' own with rounded and with exact weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import Driven, TinyModel, drive
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F

from kernels import dispatch
from kernels.reference import linear as formats
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.layers import quant
from workers.engine.layers.linear import PackedLinear, pack_linears
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row
from workers.protocol.messages import SamplingParams

TinyModels = Callable[[str], TinyModel]
OPS = dispatch.choose(torch.device("cpu"))
DEMO = Path(__file__).resolve().parents[3] / "ops/demo_model/model"
COSINES = {"int8": 0.9999, "fp8": 0.998, "int4": 0.98, "w8a8": 0.999, "llm_int8": 0.999}
"""Least cosine of the demo model's logits with those of exact weights, in the mean over positions; found on English text:
0.99997, 0.9991, 0.990."""


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 301), k=length)


def logits_of(model: TinyModel, prompt: list[int], kind: str) -> torch.Tensor:
    """`[tokens - 1, vocabulary]`, each row moved to mean 0."""
    return all_logits(model.runner(quant=kind), prompt)


def all_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    row = Row(prompt, 0, list(range(1, 16)), prompt_logprobs=runner.vocab_size)
    (result,) = runner.execute([row])
    found = torch.full((len(prompt) - 1, runner.vocab_size), torch.nan)
    for position, entry in enumerate(result.prompt_logprobs):
        for top in entry.top:
            found[position, top.token] = top.logprob
    return found - found.mean(-1, keepdim=True)


def expected_of(reference: nn.Module, prompt: list[int]) -> torch.Tensor:
    logits = reference(input_ids=torch.tensor([prompt])).logits[0, :-1]
    return logits - logits.mean(-1, keepdim=True)


def rounded(reference: nn.Module, kind: str) -> nn.Module:
    """transformers' model with every linear weight but the head's on the grid of the format."""
    model = copy.deepcopy(reference)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or name == "lm_head":
            continue
        weight = module.weight
        if kind == "int8":
            grid = formats.dequantize_int8(*formats.quantize_int8(weight), weight.dtype)
        else:
            group = max(g for g in formats.GROUPS if weight.shape[1] % g == 0)
            grid = formats.dequantize_int4(*formats.quantize_int4(weight, group), weight.dtype).T
        weight.copy_(grid)
    return model


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen3", "phi3", "gemma2"])
def test_logits_are_those_of_the_rounded_weights(tiny_model: TinyModels, name, kind):
    model, prompt = tiny_model(name), prompt_of(40)
    expected = expected_of(rounded(model.reference, kind), prompt)
    torch.testing.assert_close(logits_of(model, prompt, kind), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.rest
def test_logits_of_a_trained_model_stay_near_those_of_exact_weights():
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    prompt = tokenizer.encode((DEMO.parent / "README.md").read_text()).ids[:24]

    def logits(kind: str) -> torch.Tensor:
        told = RunnerSettings(str(DEMO), device="cpu", dtype="float32", num_blocks=16, quant=kind)
        return all_logits(ModelRunner(told), prompt)

    exact = logits("none")
    for kind, least in COSINES.items():
        cosine = F.cosine_similarity(logits(kind), exact, dim=-1).mean().item()
        assert least <= cosine < 1 - 1e-6, kind


def test_a_stream_is_the_same_alone_and_in_a_batch(tiny_model: TinyModels):
    runner = tiny_model("llama").runner(quant="int8")
    params = SamplingParams(seed=5, temperature=0.9, min_tokens=99)

    def stream(others: int) -> list[int]:
        watched = Driven(prompt_of(17), params)
        drive(runner, [watched, *(Driven(prompt_of(5 + i), params, i) for i in range(others))], 12)
        return watched.output

    assert stream(0) == stream(3)


def test_the_root_names_the_format(tiny_model: TinyModels):
    model = tiny_model("llama")
    roots = {model.runner(quant=kind).root for kind in ("none", *COSINES)}
    assert len(roots) == 1 + len(COSINES)


def test_only_the_head_stays_exact():
    model = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 8, bias=False)), nn.ReLU())
    model.requires_grad_(False)
    head = model[1][0]
    expected = model(torch.ones(5, 64))
    assert pack_linears(model, quant.linear_maker("int8", OPS), head) == 2
    assert isinstance(model[0], quant.QuantLinear) and isinstance(model[1][0], PackedLinear)
    torch.testing.assert_close(model(torch.ones(5, 64)), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", COSINES)
def test_leading_dimensions_and_no_rows_at_all_come_back_as_they_were(kind):
    layer = quant.linear_maker(kind, OPS)(torch.randn(32, 64), torch.randn(32), None)
    x = torch.randn(2, 3, 64)
    assert torch.equal(layer(x).view(6, 32), layer(x.view(6, 64)))
    assert layer(x[:0]).shape == (0, 3, 32)


@pytest.mark.parametrize(("kind", "width"), [("int4", 48), ("fp8", 40), ("w8a8", 36), ("llm_int8", 36)])
def test_a_width_that_a_format_cannot_take_is_refused_in_one_sentence(kind, width):
    with pytest.raises(ModelError, match=f"but one has {width}"):
        quant.linear_maker(kind, OPS)(torch.randn(16, width), None, None)
