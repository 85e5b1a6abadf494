"""The pass of a CPU worker computes what transformers computes layer by layer, in float32 and over 16-bit weights."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_models import Driven, TinyModel, drive

from kernels.cpu import compiled
from workers.engine.device.runner import ModelRunner
from workers.engine.layers import linear
from workers.engine.model import cpu_pass
from workers.engine.model.cpu_pass import CpuPass
from workers.engine.values.layout import Tree
from workers.engine.values.plan import Row, SampleSpec
from workers.protocol.messages import SamplingParams

TinyModels = Callable[[str], TinyModel]
FAMILY = ["llama", "llama-tied-biased", "qwen2", "qwen3", "mistral"]
EXPERTS = ["mixtral", "qwen3_moe"]
COMPILED = [*FAMILY, "phi3", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi", "starcoder2", *EXPERTS]
"""Models whose layers are compiled."""
PROMPT = list(range(20, 45))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Makes a model by its name, once: tests only read it."""

    @functools.cache
    def make(name: str) -> TinyModel:
        # Whole panels, so that there are compiled layers.
        changes = {"intermediate_size": 128}
        if name == "qwen3_moe":
            changes["moe_intermediate_size"] = 64
        model = TinyModel.make(name, tmp_path_factory.mktemp(name), **changes)
        if name in FAMILY:
            return model
        # Norms of a new model are all one or zero: here they differ.
        generator = torch.Generator().manual_seed(5)
        for tensor in model.reference.parameters():
            if tensor.dim() == 1:
                tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
        model.reference.save_pretrained(model.directory)
        return model

    return make


@pytest.fixture(scope="module")
def compiled_runner(tiny_model: TinyModels) -> Callable[[str, str], ModelRunner]:
    """Makes a runner with compiled layers, with inputs in float32, whichever CPU this is. Tests share the one of a model
    and dtype, as they write the KV that they read."""

    @functools.cache
    def make(name: str, dtype: str) -> ModelRunner:
        with pytest.MonkeyPatch.context() as patch:
            needs_panels(patch)
            return tiny_model(name).runner(dtype=dtype)

    return make


@pytest.mark.parametrize("name", COMPILED)
def test_these_families_take_it_and_say_the_tokens_of_transformers(tiny_model: TinyModels, name: str) -> None:
    model = tiny_model(name)
    runner = model.runner()
    takes_it = name in FAMILY or not compiled.refusal()
    assert isinstance(runner.loaded.hidden_states, CpuPass) is takes_it
    check_tokens(model, runner)


def check_tokens(model: TinyModel, runner: ModelRunner) -> None:
    """Checks that the tokens are those of transformers."""
    sequence = Driven(PROMPT)
    drive(runner, [sequence], 20)
    ids = torch.tensor([PROMPT])
    expected = model.reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    assert sequence.output == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("name", "changes", "takes_it"),
    [
        ("gpt_neox", {"use_parallel_residual": False}, True),
        ("gpt_neox", {"hidden_act": "gelu_new", "attention_bias": False}, True),
        ("gpt_neox", {"hidden_act": "relu"}, False),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}, True),
        ("phi", {"qk_layernorm": True}, False),
    ],
    ids=str,
)
def test_what_such_layers_may_be_besides_is_seen(
    tmp_path: Path, name: str, changes: dict[str, object], takes_it: bool
) -> None:
    model = TinyModel.make(name, tmp_path, **changes)
    runner = model.runner()
    assert isinstance(runner.loaded.hidden_states, CpuPass) is (takes_it and not compiled.refusal())
    check_tokens(model, runner)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("way", ["panels", "fbgemm"])
def test_over_16_bit_weights_it_is_nearer_to_float32_than_a_pass_in_bfloat16(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    """Against transformers in float32 with the very weights that bfloat16 leaves."""
    model = tiny_model(name)
    monkeypatch.setattr(linear, "widens", lambda dtype: False)
    with monkeypatch.context() as without_panels:
        without_panels.setattr(linear, "_has_panels", lambda weight: False)
        narrow = last_logits(model.runner(dtype="bfloat16"))
    if way == "panels":
        needs_panels(monkeypatch)
    else:
        widened(monkeypatch)
    runner = model.runner(dtype="bfloat16")
    own = runner.loaded.hidden_states
    assert isinstance(own, CpuPass) and own.dtype == torch.float32
    assert runner.loaded.min_tokens == 1
    reference = copy.deepcopy(model.reference)
    for weight in reference.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()
    exact = reference(torch.tensor([PROMPT])).logits[0, -1]
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


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_take_the_compiled_layers_whoever_is_beside_them(
    compiled_runner: Callable[[str, str], ModelRunner], monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    needs_panels(monkeypatch)
    runner = compiled_runner(name, dtype)
    assert runner.loaded.hidden_states.is_compiled
    others = [PROMPT[3:9], PROMPT[::-1]]
    tables = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    logits = []
    for beside in ([], others, others[:1]):
        runner.execute([Row(PROMPT[:-1], 0, tables[0])])
        rows = [Row([PROMPT[-1]], len(PROMPT) - 1, tables[0], (drawing(PROMPT),))]
        rows += [Row(p, 0, t, (drawing(p),)) for p, t in zip(beside, tables[1:], strict=False)]
        logits.append(seen_logits(runner, rows)[0])
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    monkeypatch.setattr(runner.loaded.hidden_states, "_compiled", None)
    runner.execute([Row(PROMPT[:-1], 0, tables[0])])
    plain = seen_logits(runner, rows[:1])[0]
    limit = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    assert (logits[0] - plain).abs().max() <= limit * plain.abs().max()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_guesses_are_proved_with_the_bits_of_single_steps_whoever_is_beside_them(
    compiled_runner: Callable[[str, str], ModelRunner], monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    needs_panels(monkeypatch)
    runner = compiled_runner(name, dtype)
    start, end = 5, 23
    first, num_guesses = PROMPT[:start], end - start - 1
    table, others = [[*range(at, at + 7)] for at in (1, 10)], [[9], PROMPT[:3], PROMPT]
    runner.execute([Row(first, 0, table[0])])
    steps = [
        seen_logits(runner, [Row([PROMPT[at]], at, table[0], (drawing(PROMPT[: at + 1]),))]) for at in range(start, end)
    ]
    draws = tuple(drawing(PROMPT[: at + 1]) for at in range(start, end))
    for beside in ([], others):
        runner.execute([Row(first, 0, table[1])])
        rows = [Row(p, 0, [*range(20 + 8 * i, 28 + 8 * i)]) for i, p in enumerate(beside)]
        guessed = Row(PROMPT[start:end], start, table[1], draws, num_proposed=num_guesses)
        assert torch.equal(seen_logits(runner, [*rows, guessed]), torch.cat(steps))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuts", [[1], [24], [3, 4, 21], [16, 17], [*range(1, 25)]], ids=str)
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    compiled_runner: Callable[[str, str], ModelRunner], monkeypatch: pytest.MonkeyPatch, dtype: str, cuts: list[int]
) -> None:
    needs_panels(monkeypatch)
    runner = compiled_runner("qwen3", dtype)
    whole = last_logits(runner)
    with torch.inference_mode():
        kv = runner.store.layer(0)[0][1:8].clone()
        runner.store.layer(0)[0].fill_(float("nan"))
    table, logits = [*range(1, 8)], None
    for first, end in pairwise([0, *cuts, len(PROMPT)]):
        row = Row(PROMPT[first:end], first, table, (drawing(PROMPT[:end]),))
        logits = seen_logits(runner, [row])[0]
    assert torch.equal(logits, whole)
    filled = runner.store.layer(0)[0][1:8]
    for place in range(len(PROMPT)):
        slot = (place // runner.block_size, slice(None), slice(None), place % runner.block_size)
        assert torch.equal(filled[slot], kv[slot])


def test_trees_alone_are_left_to_torchs_operations(tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_panels(monkeypatch)
    runner = tiny_model("llama").runner()
    taken: list[int] = []
    compiled_rows = runner.loaded.hidden_states._compiled
    run_plain = runner.loaded.hidden_states.run_plain

    def in_one_call(hidden: torch.Tensor, *rest: object) -> None:
        taken.append(len(hidden))
        compiled_rows(hidden, *rest)

    def plain(layers: range, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        taken.append(-len(hidden))
        run_plain(layers, hidden, positions)

    monkeypatch.setattr(runner.loaded.hidden_states, "_compiled", in_one_call)
    monkeypatch.setattr(runner.loaded.hidden_states, "run_plain", plain)
    rows = [Row(PROMPT[:n], 0, [*range(1 + 8 * i, 9 + 8 * i)]) for i, n in enumerate([17, 1, 4])]
    runner.execute(rows)
    assert taken == [22]
    taken.clear()
    draws = tuple(drawing(PROMPT[:4]) for _ in range(3))
    tree = Row(PROMPT[3:6], 3, [*range(30, 38)], draws, num_proposed=2, layout=Tree((-1, -1)))
    runner.execute([Row(PROMPT[:3], 0, [*range(30, 38)])])
    taken.clear()
    runner.execute([rows[0], tree, rows[1]])
    assert taken == [18, -3]


def test_without_the_compiled_functions_torch_computes_the_same_tokens(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = []
    for _ in range(2):
        runner = tiny_model("llama").runner()
        sequences.append(Driven(PROMPT))
        drive(runner, sequences[-1:], 15)
        monkeypatch.setattr(compiled, "functions", lambda: None)
    assert not runner.loaded.hidden_states.is_compiled
    assert sequences[0].output == sequences[1].output


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
    monkeypatch.setattr(linear, "_has_panels", lambda weight: False)


def needs_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled layers, with inputs in float32, whichever CPU this is."""
    if reason := compiled.refusal():
        pytest.skip(reason)
    from kernels.cpu.product import FLOATS, WIDENED  # needs numba

    monkeypatch.setattr(linear, "kind_of", lambda weight: FLOATS if weight.dtype == torch.float32 else WIDENED)


def last_logits(runner: ModelRunner) -> torch.Tensor:
    table = list(range(1, 1 + len(PROMPT)))
    return seen_logits(runner, [Row(PROMPT, 0, table, (drawing(PROMPT),))])[0]


def drawing(tokens: list[int]) -> SampleSpec:
    return SampleSpec(SamplingParams(seed=0, temperature=0.0), 0, len(tokens), tokens, [])


def seen_logits(runner: ModelRunner, rows: list[Row]) -> torch.Tensor:
    """Of one step, a line for each row."""
    seen: list[torch.Tensor] = []
    sampler = runner.loaded.sampler
    draw = sampler.draw
    sampler.draw = lambda logits, draws: seen.append(logits) or draw(logits, draws)
    runner.execute(rows)
    sampler.draw = draw
    return seen[0]
