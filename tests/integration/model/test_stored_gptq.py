"""Synthetic GPTQ and AWQ checkpoints of every variant: the engine's logits are those of the numbers they hold.

The packing here is the formats' own, written out number by number; the engine's repacking shares nothing with it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from stored_models import check_logits, prompt_of, start, wrapped, write
from tiny_models import CONFIGS, GREEDY, Driven, TinyModel, best_tokens, drive
from torch import nn
from transformers import LlamaForCausalLM

from workers.engine.commands import plan_command
from workers.engine.device import memory
from workers.engine.layers.merged_linear import Together
from workers.engine.layers.quant import QuantLinear
from workers.engine.values.errors import ModelError

TinyModels = Callable[[str], TinyModel]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Variant:
    method: str
    group: int
    """-1: all inputs of an output."""
    symmetric: bool = True
    layout: str = ""
    activation_order: bool = False
    head: bool = False
    """Whether the head is stored in 4 bits too."""
    has_zeros: bool = True
    exact: str = "no such layer"
    """Layers of this name are not quantized."""
    bits: int = 4

    def settings(self) -> dict[str, object]:
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return common | {"zero_point": not self.symmetric, "version": self.layout or "gemm"}
        layout = {"checkpoint_format": self.layout} if self.layout else {}
        return common | {"sym": self.symmetric, "desc_act": self.activation_order} | layout


VARIANTS = {
    "gptq symmetric": Variant("gptq", 32),
    "gptq zero points": Variant("gptq", 32, symmetric=False),
    "gptq v2 zero points": Variant("gptq", 32, symmetric=False, layout="gptq_v2"),
    "gptq activation order": Variant("gptq", 32, activation_order=True),
    "gptq activation order, zero points": Variant("gptq", 32, False, activation_order=True),
    "gptq one group": Variant("gptq", -1, symmetric=False),
    "gptq, one layer exact": Variant("gptq", 32, exact="k_proj"),
    "gptq 8 bits, activation order, zero points": Variant("gptq", 32, False, activation_order=True, bits=8),
    "gptq v2 8 bits, symmetric": Variant("gptq", 32, layout="gptq_v2", bits=8),
    "awq zero points": Variant("awq", 32, symmetric=False),
    "awq one group": Variant("awq", -1, symmetric=False),
    "awq without zeros": Variant("awq", 32, has_zeros=False, layout="gemm"),
}


@dataclass(frozen=True)
class Numbers:
    """Of one layer: `[in, out]` in 0…2ᵇ-1, `[groups, out]`, and the group of each input."""

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    groups: torch.Tensor

    @classmethod
    def draw(cls, variant: Variant, shape: torch.Size, generator: torch.Generator) -> Numbers:
        out_features, in_features = shape
        size = in_features if variant.group == -1 else variant.group
        number = in_features // size
        groups = torch.arange(in_features) // size
        if variant.activation_order:
            groups = groups[torch.randperm(in_features, generator=generator)]

        def integers(low: int, *sizes: int) -> torch.Tensor:
            return torch.randint(low, 2**variant.bits, sizes, generator=generator)

        zero = integers(0, number, out_features)
        scale = torch.rand((number, out_features), generator=generator).half() * 0.05 + 0.01
        scale *= 16 / 2**variant.bits
        values = integers(0, in_features, out_features)
        if variant.symmetric:
            zero.fill_(2 ** (variant.bits - 1))
        return cls(values, scale, zero, groups)

    def weight(self) -> torch.Tensor:
        """`[out, in]` float32."""
        offset = self.zero[self.groups]
        return ((self.values - offset) * self.scale.float()[self.groups]).T.contiguous()

    def stored(self, variant: Variant) -> dict[str, torch.Tensor]:
        if variant.method == "awq":
            tensors = {"qweight": words(self.values, AWQ_COLUMNS), "scales": self.scale}
            zeros = words(self.zero, AWQ_COLUMNS)
            return tensors | ({"qzeros": zeros} if variant.has_zeros else {})
        plain = tuple(range(32 // variant.bits))
        zeros = words(self.zero, plain).long()
        if variant.layout != "gptq_v2":
            zeros = zeros - (0x11111111 if variant.bits == 4 else 0x01010101)
        return {
            "qweight": words(self.values.T, plain).T.contiguous(),
            "qzeros": wrapped(zeros),
            "scales": self.scale,
            "g_idx": self.groups.to(torch.int32),
        }


def words(numbers: torch.Tensor, columns: tuple[int, ...]) -> torch.Tensor:
    """`[n, m]` → int32 `[n, m / columns]`; `columns`: which of a word's each place holds."""
    word = len(columns)
    packed = torch.zeros((len(numbers), numbers.shape[1] // word), dtype=torch.int64)
    for place, column in enumerate(columns):
        packed |= numbers[:, column::word].long() << (32 // word * place)
    return wrapped(packed)


def quantized(model: TinyModel, directory: Path, variant: Variant) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Writes the checkpoint; returns its tensors and transformers' model with the weights it means."""
    generator = torch.Generator().manual_seed(7)
    reference = copy.deepcopy(model.reference)
    tensors = load_file(model.directory / "model.safetensors")
    for path, module in reference.named_modules():
        is_left = path.endswith(variant.exact) or (path == "lm_head" and not variant.head)
        if type(module) is not nn.Linear or is_left:
            continue
        numbers = Numbers.draw(variant, module.weight.shape, generator)
        module.weight.copy_(numbers.weight())
        del tensors[f"{path}.weight"]
        tensors |= {f"{path}.{name}": value for name, value in numbers.stored(variant).items()}
    write(directory, model, variant.settings(), tensors)
    return tensors, reference


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_the_stored_numbers(tiny_model: TinyModels, tmp_path, variant):
    _, reference = quantized(tiny_model("llama"), tmp_path, variant)
    check_logits(start(tmp_path), reference)


@pytest.mark.parametrize("name", ["gptq symmetric", "gptq 8 bits, activation order, zero points", "awq zero points"])
def test_stored_layers_are_counted_as_they_are_stored(tiny_model: TinyModels, tmp_path, monkeypatch, name):
    """What is free lies between their size and that of exact ones."""
    variant = VARIANTS[name]
    quantized(tiny_model("llama"), tmp_path, variant)
    exact = sum(p.numel() * p.itemsize for p in tiny_model("llama").reference.parameters())
    linear = sum(m.weight.nbytes for m in tiny_model("llama").reference.model.modules() if type(m) is nn.Linear)
    free = exact - linear // 2
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    start(tmp_path)
    done = CliRunner().invoke(plan_command.main, [str(tmp_path), "--gpu", "cpu", "--json"])
    weights = json.loads(done.output)["model"]["weight_bytes"]
    assert exact - linear + linear * variant.bits // 32 <= weights < free
    with pytest.raises(ModelError, match="does not fit"):
        start(tiny_model("llama").directory)


def test_the_head_may_be_stored_too(tmp_path, monkeypatch):
    """With a vocabulary that zero points can be packed for."""
    config = CONFIGS["llama"]()
    config.vocab_size = 304
    monkeypatch.setitem(CONFIGS, "wide", lambda: config)
    exact, directory = TinyModel.make("wide", tmp_path / "exact"), tmp_path / "quantized"
    _, reference = quantized(exact, directory, Variant("gptq", 32, head=True))
    runner = start(directory)
    assert isinstance(runner.loaded.model.lm_head, QuantLinear)
    check_logits(runner, reference)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3", "gemma2", "mistral"])
def test_other_families_biases_and_transformers_own_layers(tiny_model: TinyModels, tmp_path, name):
    """Qwen2 has biases; Phi-3 and Gemma-2 keep transformers' layers."""
    variant = VARIANTS["gptq activation order, zero points"]
    _, reference = quantized(tiny_model(name), tmp_path, variant)
    check_logits(start(tmp_path), reference)


def test_tokens_are_the_best_ones_of_transformers(tiny_model: TinyModels, tmp_path):
    _, reference = quantized(tiny_model("qwen3"), tmp_path, VARIANTS["awq zero points"])
    sequence = Driven(prompt_of(18), GREEDY)
    drive(start(tmp_path), [sequence], 12, chunk=7)
    assert len(sequence.output) == 12
    assert sequence.output == best_tokens(reference, sequence.prompt, sequence.output)


@pytest.mark.parametrize(("variant", "layers"), [("gptq symmetric", 4), ("gptq activation order", 7)])
def test_layers_stay_in_4_bits_and_are_joined_where_their_inputs_are_grouped_alike(
    tiny_model: TinyModels, tmp_path, variant, layers
):
    quantized(tiny_model("llama"), tmp_path, VARIANTS[variant])
    model = start(tmp_path).loaded.model
    stored = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(stored) == 3 * layers
    assert all(layer.numbers.zero is None for layer in stored)
    assert all(parameter.dim() == 1 for parameter in model.model.layers.parameters())


@pytest.mark.parametrize(("variant", "number"), [("gptq symmetric", 6), ("gptq activation order", 0)])
def test_layers_of_transformers_are_joined_where_their_inputs_are_grouped_alike(
    tiny_model: TinyModels, tmp_path, variant, number
):
    _, reference = quantized(tiny_model("gemma2"), tmp_path, VARIANTS[variant])
    runner = start(tmp_path)
    together = [m for m in runner.loaded.model.modules() if isinstance(m, Together)]
    assert len(together) == number
    assert all(isinstance(one.linear, QuantLinear) for one in together)
    check_logits(runner, reference)


def changed(tiny: TinyModel, directory: Path, name: str, change: Callable) -> str:
    """The refusal of a checkpoint with one tensor changed, or removed where the change gives None."""
    tensors, _ = quantized(tiny, directory, VARIANTS["gptq zero points"])
    value = change(tensors.pop(name))
    kept = tensors if value is None else tensors | {name: value.contiguous()}
    write(directory, tiny, VARIANTS["gptq zero points"].settings(), kept)
    with pytest.raises(ModelError) as caught:
        start(directory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "change", "reason"),
    [
        ("scales", lambda t: None, "lacks 'scales'"),
        ("scales", lambda t: t[:, :-1], r"scales has shape [2, 63], not [2, 64]"),
        ("qweight", lambda t: t[:-1], "qweight has shape"),
        ("g_idx", torch.zeros_like, "groups (g_idx) are not of equal size"),
    ],
)
def test_a_layer_that_lacks_something_is_refused_with_its_name(
    tiny_model: TinyModels, tmp_path, suffix, change, reason
):
    path = "model.layers.1.self_attn.o_proj"
    # o_proj of this model reads 256 inputs and gives 64 outputs.
    text = changed(tiny_model("llama"), tmp_path, f"{path}.{suffix}", change)
    assert path in text
    assert reason.replace("[2, ", "[8, ") in text


def test_a_checkpoint_without_one_layer_is_refused(tiny_model: TinyModels, tmp_path):
    variant, path = VARIANTS["gptq symmetric"], "model.layers.2.mlp.up_proj"
    tensors, _ = quantized(tiny_model("llama"), tmp_path, variant)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(path)}
    write(tmp_path, tiny_model("llama"), variant.settings(), kept)
    with pytest.raises(ModelError, match=rf"lacks 1 tensors, the first is {path}\.weight"):
        start(tmp_path)


def test_zeros_as_a_bias_of_a_layer_that_has_none_are_left_out(tiny_model: TinyModels, tmp_path):
    """AutoGPTQ writes them."""
    tiny, variant = tiny_model("llama"), VARIANTS["gptq symmetric"]
    tensors, reference = quantized(tiny, tmp_path, variant)
    path = "model.layers.1.mlp.up_proj"
    bias = torch.zeros(tensors[f"{path}.scales"].shape[1], dtype=torch.float16)
    write(tmp_path, tiny, variant.settings(), tensors | {f"{path}.bias": bias})
    check_logits(start(tmp_path), reference)
    bias[-1] = 1
    write(tmp_path, tiny, variant.settings(), tensors | {f"{path}.bias": bias})
    with pytest.raises(ModelError, match=rf"{path}\.bias that the model has no place for"):
        start(tmp_path)


def test_no_layer_keeps_the_file_in_memory(tiny_model: TinyModels, tmp_path):
    quantized(tiny_model("llama"), tmp_path, VARIANTS["gptq symmetric"])
    runner = start(tmp_path)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert runner.num_blocks


def test_a_quantized_layer_that_transformers_ignores_is_skipped(tiny_model: TinyModels, tmp_path, monkeypatch):
    """Checkpoints carry layers for guessing ahead that their model class does not have."""
    tiny, variant = tiny_model("llama"), VARIANTS["gptq symmetric"]
    tensors, reference = quantized(tiny, tmp_path, variant)
    path = "model.layers.0.mlp.up_proj."
    extra = {f"model.mtp.{name.removeprefix(path)}": t.clone() for name, t in tensors.items() if name.startswith(path)}
    assert extra
    write(tmp_path, tiny, variant.settings(), tensors | extra)
    with pytest.raises(ModelError, match=r"model\.mtp\.weight that the model has no place for"):
        start(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^model\.mtp\."])
    check_logits(start(tmp_path), reference)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3}, r"\(gptq\) to 3 bits"),
        ({"quant_method": "awq", "version": "gemv"}, r"\(awq\) in the layout gemv"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "in the layout marlin"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes\)"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tiny_model: TinyModels, tmp_path, settings, reason):
    write(tmp_path, tiny_model("llama"), settings, {"x": torch.zeros(1)})
    with pytest.raises(ModelError, match=reason):
        start(tmp_path)


def test_a_quantized_checkpoint_is_not_rounded_again(tiny_model: TinyModels, tmp_path):
    quantized(tiny_model("llama"), tmp_path, VARIANTS["gptq symmetric"])
    with pytest.raises(ModelError, match=r"quantized already \(gptq\)"):
        start(tmp_path, quant="int8")
