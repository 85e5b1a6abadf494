"""Fused layers of transformers' own models: they answer what they answered, or they are left as they were."""

from __future__ import annotations

import functools
import logging
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tiny_models import TinyModel
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from kernels import dispatch
from kernels.dispatch import TWINS, Ops
from workers.engine import loading
from workers.engine.device.runner import ModelRunner
from workers.engine.layers.linear import PackedLinear, Split, SplitLinear, can_pack
from workers.engine.layers.merged_linear import Part, Together
from workers.engine.model import fusers, llama
from workers.engine.model.fusers import Change, Found, GatedProduct, Norm
from workers.engine.model.packing import pack
from workers.engine.settings import WorkerSettings
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row

TinyModels = Callable[[str], TinyModel]
CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Of the largest logit, over the whole model in float32: the bound of the probe at load."""
PROMPTS = [random.Random(seed).choices(range(3, 301), k=40) for seed in range(4)]
FAMILIES = {
    # joined products, norms, packed transposed layers, activations
    "gemma2": (6, 13, 0, 0),
    "gemma3": (6, 19, 0, 0),
    "phi3": (0, 7, 0, 0),
    "gpt2": (0, 0, 8, 2),
    "granite": (6, 7, 0, 0),
    "cohere": (6, 4, 0, 0),
    "gpt_oss": (3, 7, 0, 0),
    "mixtral": (3, 7, 0, 0),
}


@pytest.fixture(autouse=True)
def _without_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, or on a CPU whose layers are not compiled: some of these families have hand-written layers else."""
    monkeypatch.setattr(llama, "MORE_KINDS", {})


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Norms and biases of a new model are all one or zero: here they differ."""
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            model = TinyModel.make(name, tmp_path_factory.mktemp(name))
            generator = torch.Generator().manual_seed(5)
            for tensor in model.reference.parameters():
                if tensor.dim() == 1:
                    tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
            model.reference.save_pretrained(model.directory)
            made[name] = model
        return made[name]

    return make


@pytest.fixture(scope="module")
def unfused(tiny_model: TinyModels) -> Callable[[str], torch.Tensor]:
    """Returns the logits of a model in float32 as transformers has it."""

    @functools.cache
    def logits(name: str) -> torch.Tensor:
        plain = tiny_model(name).runner(fuse=False)
        assert fused_parts(plain)[:2] == (0, 0)
        return logits_of(plain)

    return logits


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """Of every token of some prompts, each in a pass of its own."""
    loaded, found = runner.loaded, []
    with torch.inference_mode():
        for prompt in PROMPTS:
            packed = pack([Row(prompt, 0, list(range(1, 12)))], runner.block_size, CPU)
            loaded.step.context = packed.context
            found.append(loaded.head(loaded.hidden_states(packed.token_ids, packed.positions)))
    return torch.cat(found)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == fusers.__name__]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def fused_parts(runner: ModelRunner) -> tuple[int, int, int, int]:
    model = runner.loaded.model
    modules = list(model.modules())
    forwards = [module.__dict__.get("forward") for module in modules]
    head = model.get_output_embeddings()
    transposed = [
        m for m in modules if isinstance(m, PackedLinear) and m is not head and "gpt2" in model.config.model_type
    ]
    return (
        sum(isinstance(module, Together) for module in modules),
        sum(isinstance(forward, Norm) for forward in forwards),
        len(transposed),
        sum(getattr(forward, "func", None) is nn.functional.gelu for forward in forwards),
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fused_model_says_what_it_says_unfused(
    tiny_model: TinyModels, unfused: Callable[[str], torch.Tensor], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    fused, expected = tiny_model(name).runner(), unfused(name)
    assert not warnings_of(caplog)
    if can_pack(torch.empty((1, 1))):
        assert fused_parts(fused) == FAMILIES[name]
    assert apart(logits_of(fused), expected) <= TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_in_bfloat16_a_fused_model_is_as_near_to_float32_as_unfused(
    tiny_model: TinyModels, unfused: Callable[[str], torch.Tensor], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    model = tiny_model(name)
    exact = unfused(name)
    fused, plain = (logits_of(model.runner(dtype="bfloat16", fuse=fuse)) for fuse in (True, False))
    assert not warnings_of(caplog)
    assert (fused - exact).norm() <= 1.25 * (plain - exact).norm()


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("int8", 1e-4), ("int4", 1e-4), ("w8a8", 5e-2)],  # with activations a last bit is a step of 127
)
@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_rounded_weights_are_the_same_numbers_joined(
    tiny_model: TinyModels, name: str, kind: str, tolerance: float
) -> None:
    model = tiny_model(name)
    fused, plain = model.runner(quant=kind), model.runner(quant=kind, fuse=False)
    assert fused_parts(fused)[0] == 6
    assert apart(logits_of(fused), logits_of(plain)) <= tolerance


def test_no_format_rounds_transposed_layers_fused_or_not(tiny_model: TinyModels) -> None:
    model = tiny_model("gpt2")
    rounded, exact = logits_of(model.runner(quant="int8")), logits_of(model.runner())
    assert torch.equal(rounded, exact)


def test_layers_with_the_same_input_are_multiplied_once_in_a_pass(tiny_model: TinyModels) -> None:
    runner = tiny_model("gemma2").runner()
    calls: Counter[nn.Module] = Counter()
    for module in runner.loaded.model.modules():
        if isinstance(module, Together):
            module.linear.register_forward_hook(lambda m, *_: calls.update([m]))
            assert module._input is None and not module._outputs
    logits_of(runner)
    assert len(calls) == 6 and set(calls.values()) == {len(PROMPTS)}


def test_weights_exist_once(tiny_model: TinyModels) -> None:
    for name in ("gemma2", "gpt2"):
        model = tiny_model(name).runner().loaded.model
        assert not [m for m in model.modules() if type(m) in (nn.Linear, Conv1D)]


@pytest.mark.parametrize(("told", "number"), [("on", 6), ("off", 0)])
def test_a_worker_is_told_to_fuse_or_not(tiny_model: TinyModels, told: str, number: int) -> None:
    directory = str(tiny_model("gemma2").directory)
    settings = WorkerSettings(model=directory, engine_device="cpu", engine_num_blocks=16, engine_fuse=told)
    assert fused_parts(loading.load(settings))[0] == number


def test_the_hand_written_family_is_left_alone_and_takes_adapters(tiny_model: TinyModels) -> None:
    runner = tiny_model("llama").runner(max_adapters=1)
    assert fused_parts(runner)[:2] == (0, 0)
    assert runner.loaded.adapters is not None


@pytest.mark.parametrize("fuse", [True, False])
def test_other_models_refuse_adapters_fused_or_not(tiny_model: TinyModels, fuse: bool) -> None:
    with pytest.raises(ModelError, match="all of the Llama family"):
        tiny_model("gemma2").runner(max_adapters=1, fuse=fuse)


def test_what_differs_stays_as_it_was_and_the_log_says_so(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs in the wrong places; everything else is fused."""
    right = Together.take
    monkeypatch.setattr(Together, "take", lambda self, part, x: right(self, part, x).flip(-1))
    model = tiny_model("gemma2")
    with caplog.at_level(logging.WARNING):
        runner = model.runner()
    assert "model.layers.2.self_attn stays unfused: off by" in caplog.text
    assert "model.layers.0.mlp stays unfused: off by" in caplog.text
    assert fused_parts(runner) == (0, 13, 0, 0)
    assert apart(logits_of(runner), logits_of(model.runner(fuse=False))) <= TOLERANCE


def test_what_cannot_be_called_stays_as_it_was(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(found: Found, _: object) -> Change | None:
        wrong = type(found.module) is Gemma2RMSNorm
        return Change(lambda: None) if wrong else None

    monkeypatch.setattr(fusers, "_FUSERS", (refusing,))
    model = tiny_model("gemma2")
    with caplog.at_level(logging.WARNING):
        runner = model.runner()
    assert "model.norm stays unfused: it cannot be called so" in caplog.text
    assert torch.equal(logits_of(runner), logits_of(model.runner(fuse=False)))


@pytest.mark.parametrize("name", ["phi3", "gemma2", "granite"])
def test_where_there_are_kernels_they_take_norms_and_gated_products(
    tiny_model: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ops that are not their twins, though they compute the same: what a GPU would choose."""
    calls: Counter[str] = Counter()

    def kernel(op: str) -> dispatch.Kernel:
        return lambda *args: (calls.update([op]), TWINS[op](*args))[1]

    mine = {op: kernel(op) for op in ("rms_norm", "silu_mul", "gelu_mul")}
    monkeypatch.setattr(dispatch, "choose", lambda device: Ops(CPU, dict(TWINS) | mine))
    model = tiny_model(name)
    fused, plain = model.runner(), model.runner(fuse=False)
    forwards = [m.__dict__.get("forward") for m in fused.loaded.model.modules()]
    assert sum(isinstance(forward, GatedProduct) for forward in forwards) == 3
    calls.clear()
    logits = logits_of(fused)
    assert calls == {
        "rms_norm": FAMILIES[name][1] * len(PROMPTS),
        "gelu_mul" if name == "gemma2" else "silu_mul": 3 * len(PROMPTS),
    }
    assert apart(logits, logits_of(plain)) <= TOLERANCE


# --- the parts ---


def norm_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    change = fusers._norm(Found(module, (x,), Ops(CPU, dict(TWINS))), PackedLinear)
    assert change is not None and change.forward is not None
    return change.forward(x)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_a_factor_of_one_more_is_told_from_a_large_weight(kind: type[nn.Module]) -> None:
    """In bfloat16 they would be the same: 80 and 81 are neighbours."""
    module = kind(64).to(torch.bfloat16).requires_grad_(False)
    module.weight.fill_(80.0)
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert apart(norm_of(module, x).float(), module(x).float()) <= 4e-3


def test_a_norm_of_another_kind_is_not_taken() -> None:
    class Mine(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.01

    found = Found(Mine(64), (torch.randn(5, 64),), Ops(CPU, dict(TWINS)))
    assert fusers._norm(found, PackedLinear) is None


def test_a_norm_that_takes_nothing_but_its_own_dtype_is_not_taken() -> None:
    class Mine(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.weight, x, x.T)

    found = Found(Mine(64).to(torch.bfloat16), (torch.ones(5, 64).bfloat16(),), Ops(CPU, dict(TWINS)))
    assert fusers._norm(found, PackedLinear) is None


class Attention(nn.Module):
    def __init__(self, *linears: nn.Module) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = linears


def linear(outputs: int, inputs: int = 16, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def split_linear() -> nn.Linear:
    return SplitLinear(linear(8), Split(lambda x: x))


@pytest.mark.parametrize(
    "linears",
    [
        (split_linear(), split_linear(), split_linear()),
        (linear(8), linear(8), split_linear()),
        (linear(8), linear(8), linear(8, 32)),
        (linear(8), linear(8), linear(8, bias=True)),
        (linear(8), linear(8), nn.Identity()),
    ],
    ids=["joined by ranks", "one joined by ranks", "inputs", "biases", "no linear"],
)
def test_layers_that_are_not_one_layer_stay_themselves(linears: tuple[nn.Module, ...]) -> None:
    found = Found(Attention(*linears), (), Ops(CPU, dict(TWINS)))
    assert fusers._siblings(found, PackedLinear) is None


def test_parts_are_right_in_any_order_and_with_any_input() -> None:
    linears = [linear(size, bias=True) for size in (8, 4, 4)]
    change = fusers._siblings(Found(Attention(*linears), (), Ops(CPU, dict(TWINS))), PackedLinear)
    assert change is not None
    parts = list(change.children.values())
    assert all(isinstance(part, Part) for part in parts)
    one, other = torch.randn(4, 16), torch.randn(4, 16)
    for index, x in [(2, one), (0, one), (0, one), (1, other), (1, one), (2, one), (0, other)]:
        torch.testing.assert_close(parts[index](x), linears[index](x))
