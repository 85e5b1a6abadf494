"""Rows without some of their blocks, and attention that is measured, against transformers' eager attention."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from engine_driver import LINK, Driver
from fakes import generate_request
from tiny_models import GREEDY, TinyModel

from workers.engine import settings
from workers.engine.device.runner import ModelRunner
from workers.engine.loading import load
from workers.engine.sparsity.budget import Sparsity, received
from workers.engine.values.errors import ModelError
from workers.engine.values.layout import Thinned
from workers.engine.values.plan import Row
from workers.engine.values.probe import DECAY, AttentionMass

pytestmark = pytest.mark.rest

TinyModels = Callable[[str], TinyModel]
SIZE = 4
ROUTES = ["llama", "qwen3", "phi3", "mixtral"]
"""Hand-written layers, with and without norms of queries, and layers of transformers."""


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 301), k=length)


def eager_mass(model: TinyModel, prompt: list[int], number: int) -> torch.Tensor:
    """Attention that the last `number` tokens pay to each block, each the less the more follow."""
    found = model.reference(input_ids=torch.tensor([prompt]), output_attentions=True).attentions
    received = DECAY ** torch.arange(number - 1, -1, -1) @ torch.stack(found)[:, 0, :, -number:].mean((0, 1))
    padded = torch.nn.functional.pad(received, (0, -len(prompt) % SIZE))
    return padded.view(-1, SIZE).sum(-1)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize(("length", "number"), [(30, 7), (32, 1), (21, 21)])
def test_measured_attention_is_that_of_the_model(tiny_model: TinyModels, name, length, number):
    model, prompt = tiny_model(name), prompt_of(length)
    runner = model.runner(sparse=True)
    table = list(range(9, 9 + -(-length // SIZE)))
    neighbour = Row(prompt_of(5), 0, [1, 2])
    _, result = runner.execute([neighbour, Row(prompt, 0, table, probe=AttentionMass(number))])
    assert sum(result.probed) == pytest.approx((1 - DECAY**number) / (1 - DECAY), rel=1e-5)
    expected = eager_mass(model, prompt, number)
    torch.testing.assert_close(torch.tensor(result.probed), expected, atol=1e-4, rtol=1e-3)


def test_it_is_the_same_in_how_many_steps_it_is_measured(tiny_model: TinyModels):
    model, prompt = tiny_model("llama"), prompt_of(30)
    runner, table = model.runner(sparse=True), list(range(1, 9))
    (whole,) = runner.execute([Row(prompt, 0, table, probe=AttentionMass(12))])
    mass: list[float] = []
    for start, end, number in ((0, 20, 2), (20, 29, 9), (29, 30, 1)):
        (part,) = runner.execute([Row(prompt[start:end], start, table, probe=AttentionMass(number))])
        mass = received(mass, part.probed)
    assert mass == pytest.approx(whole.probed, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("told", [{"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"dtype": "bfloat16"}])
def test_attention_is_measured_over_any_format_of_kv(tiny_model: TinyModels, told):
    model, prompt = tiny_model("llama"), prompt_of(30)
    runner = model.runner(sparse=True, **told)
    (result,) = runner.execute([Row(prompt, 0, list(range(1, 9)), probe=AttentionMass(8))])
    expected = eager_mass(model, prompt, 8)
    assert (torch.tensor(result.probed) - expected).abs().max() < 0.15 * expected.max()


def logprobs(runner: ModelRunner, row: Row) -> torch.Tensor:
    """Of every token behind the row's first one."""
    (result,) = runner.execute([row])
    return torch.tensor([token.logprob for token in result.prompt_logprobs])


@pytest.mark.parametrize("name", ROUTES)
def test_a_row_sees_what_is_left_and_nothing_else(tiny_model: TinyModels, name):
    """24 tokens in full sight, blocks 1, 2 and 4 dropped, then 7 more at their own positions."""
    model, prompt = tiny_model(name), prompt_of(31)
    runner = model.runner(sparse=True)
    runner.execute([Row(prompt[:24], 0, [1, 2, 3, 4, 5, 6])])
    row = Row(prompt[24:], 24, [1, 4, 6, 7, 8], prompt_logprobs=0, layout=Thinned(12))
    found = logprobs(runner, row)
    mask = torch.ones(31, 31, dtype=torch.bool).tril()
    mask[24:, 4:12] = mask[24:, 16:20] = False
    bias = torch.zeros(31, 31).masked_fill(~mask, torch.finfo(torch.float32).min)
    told = {"input_ids": torch.tensor([prompt]), "attention_mask": bias[None, None]}
    logits = model.reference(**told).logits[0, 24:-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(prompt[25:])[:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    whole = logprobs(runner, Row(prompt[24:], 24, [*range(1, 9)], prompt_logprobs=0))
    assert (whole - found).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_models_with_windows_are_refused(tiny_model: TinyModels, name):
    with pytest.raises(ModelError, match="KV_SPARSITY does not go with"):
        tiny_model(name).runner(sparse=True)


def test_a_worker_of_such_a_model_does_not_start(monkeypatch, tiny_model: TinyModels):
    told = {
        "MODEL": str(tiny_model("mistral").directory),
        "ENGINE_NUM_BLOCKS": "64",
        "ENGINE_KV_SPARSITY": "heavy",
        "ENGINE_KV_BUDGET": "64",
    }
    for name, value in told.items():
        monkeypatch.setenv(f"HEADGATE_{name}", value)
    with pytest.raises(ModelError, match="KV_SPARSITY does not go with"):
        load(settings.load())


def stream(runner: ModelRunner, sparsity: Sparsity | None, number: int = 40, **options: int) -> list[int]:
    drive = Driver(runner, sparsity=sparsity, **options)
    drive.send(generate_request("r", prompt_of(30), number, sampling=GREEDY, root=runner.root))
    drive.run().check_idle()
    return drive.tokens[LINK, "r", 0]


def test_a_budget_that_is_never_reached_changes_no_token(tiny_model: TinyModels):
    model = tiny_model("llama")
    plain = stream(model.runner(), None)
    assert stream(model.runner(sparse=True), Sparsity("heavy", 18, SIZE)) == plain
    # One token less: it may grow beyond, is measured, and ends before it is cut.
    assert stream(model.runner(sparse=True), Sparsity("heavy", 18, SIZE), 43)[:40] == plain


@pytest.mark.parametrize("policy", ["heavy", "recent"])
def test_a_small_budget_changes_tokens_and_repeats_them(tiny_model: TinyModels, policy):
    model, sparsity = tiny_model("llama"), Sparsity(policy, 5, SIZE)
    found = stream(model.runner(sparse=True), sparsity)
    assert len(found) == 40
    assert found != stream(model.runner(), None)
    assert found == stream(model.runner(sparse=True), sparsity)


@pytest.mark.parametrize("chunk", [3, 7, 16])
def test_chunks_of_a_prompt_change_no_token(tiny_model: TinyModels, chunk):
    model, sparsity = tiny_model("llama"), Sparsity("heavy", 5, SIZE)
    found = stream(model.runner(sparse=True), sparsity, max_batch_tokens=chunk, max_running=min(chunk, 8))
    assert found == stream(model.runner(sparse=True), sparsity)
