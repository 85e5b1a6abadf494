"""Synthetic compressed-tensors checkpoints: the engine's logits are those of the numbers they hold.

The packing here is the format's own, written out bit by bit; the engine's shares nothing with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored_models import check_logits, start, wrapped, write
from tiny_models import TinyModel
from torch import nn

from workers.engine.layers.quant import Channels, Packed, QuantLinear
from workers.engine.values.errors import ModelError

TinyModels = Callable[[str], TinyModel]
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_TOKENS = TOKENS | {"type": "float"}


@dataclass(frozen=True)
class Variant:
    layout: str
    bits: int
    group: int = 0
    """0: a scale per output; -1: one for all."""
    symmetric: bool = True
    activations: dict[str, object] | None = None
    ordered: bool = False

    @property
    def kind(self) -> str:
        return "float" if self.layout == "float-quantized" else "int"

    def settings(self) -> dict[str, object]:
        weights = {"num_bits": self.bits, "type": self.kind, "symmetric": self.symmetric}
        weights["strategy"] = {0: "channel", -1: "tensor"}.get(self.group, "group")
        weights["group_size"] = self.group if self.group > 0 else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": self.activations}
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }


VARIANTS = {
    "4 bits, groups": Variant("pack-quantized", 4, 32),
    "4 bits, groups, zero points": Variant("pack-quantized", 4, 32, symmetric=False),
    "4 bits, channels": Variant("pack-quantized", 4),
    "4 bits, order": Variant("pack-quantized", 4, 32, ordered=True),
    "8 bits, groups": Variant("pack-quantized", 8, 32),
    "8 bits, groups, zero points, order": Variant("pack-quantized", 8, 32, False, None, True),
    "int8 weights": Variant("int-quantized", 8),
    "int8 weights, one scale": Variant("int-quantized", 8, -1),
    "w8a8": Variant("int-quantized", 8, activations=TOKENS),
    "fp8": Variant("float-quantized", 8, activations=FP8_TOKENS),
    "fp8, one scale": Variant("float-quantized", 8, -1, activations=FP8_TOKENS),
}


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """`[n, m]`, signed → int32 `[n, m · bits / 32]`, moved up by half the range, lowest bits first."""
    word = 32 // bits
    words = torch.zeros((len(values), values.shape[1] // word), dtype=torch.int64)
    for place in range(word):
        words |= (values[:, place::word].long() + 2 ** (bits - 1)) << (bits * place)
    return wrapped(words)


def drawn(
    variant: Variant, shape: torch.Size, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a layer, and its weight `[out, in]`."""
    outputs, inputs = shape
    number = inputs // variant.group if variant.group > 0 else 1
    rows = 1 if variant.group == -1 else outputs
    scale = torch.rand((rows, number), generator=generator) * 0.02 + 0.01
    low = -(2 ** (variant.bits - 1))
    values = torch.randint(low, -low, (outputs, inputs), generator=generator)
    if variant.bits == 8:
        scale /= 16
    if variant.layout != "pack-quantized":
        tensors = {"weight": values.to(torch.int8), "weight_scale": scale}
        if variant.kind == "float":
            tensors["weight"] = values.float().to(torch.float8_e4m3fn)
        return tensors, tensors["weight"].float() * scale
    zero = torch.zeros((outputs, number), dtype=torch.int64)
    tensors = {"weight_packed": packed(values, variant.bits), "weight_scale": scale}
    tensors["weight_shape"] = torch.tensor(shape)
    if not variant.symmetric:
        zero = torch.randint(low, -low, zero.shape, generator=generator)
        tensors["weight_zero_point"] = packed(zero.T, variant.bits).T.contiguous()
    groups = torch.arange(inputs) // (variant.group or inputs)
    if variant.ordered:
        groups = groups[torch.randperm(inputs, generator=generator)]
        tensors["weight_g_idx"] = groups.to(torch.int32)
    return tensors, (values - zero[:, groups]) * scale[:, groups]


class RoundedTokens(nn.Module):
    """Activations on the grid of a token's scale, in float64."""

    def __init__(self, kind: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.kind, self.weight, self.bias = kind, weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit = 448.0 if self.kind == "float" else 127.0
        scale = x.abs().amax(-1, keepdim=True) / limit
        steps = x / scale
        steps = steps.to(torch.float8_e4m3fn).float() if self.kind == "float" else steps.round()
        product = (steps.double() * scale) @ self.weight.double().T
        return (product if self.bias is None else product + self.bias).to(x.dtype)


def quantized(model: TinyModel, directory: Path, variant: Variant) -> nn.Module:
    """Writes the checkpoint; returns transformers' model with the weights it means."""
    generator, reference = torch.Generator().manual_seed(7), copy.deepcopy(model.reference)
    tensors = load_file(model.directory / "model.safetensors")
    for path, module in list(reference.named_modules()):
        if type(module) is not nn.Linear or path == "lm_head":
            continue
        stored, weight = drawn(variant, module.weight.shape, generator)
        del tensors[f"{path}.weight"]
        tensors |= {f"{path}.{name}": value for name, value in stored.items()}
        module.weight.copy_(weight)
        if variant.activations is not None:
            reference.set_submodule(path, RoundedTokens(variant.kind, weight, module.bias))
    write(directory, model, variant.settings(), tensors)
    return reference


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_the_stored_numbers(tiny_model: TinyModels, tmp_path, variant):
    reference = quantized(tiny_model("llama"), tmp_path, variant)
    runner = start(tmp_path)
    layers = [m for m in runner.loaded.model.modules() if isinstance(m, QuantLinear)]
    kind = Packed if variant.layout == "pack-quantized" else Channels
    assert layers and all(isinstance(layer.numbers, kind) for layer in layers)
    # A float on the border between two numbers of 8 bits may fall to either side.
    check_logits(runner, reference, 1e-4 if variant.activations is None else 0.05)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "phi3"])
def test_other_families(tiny_model: TinyModels, tmp_path, name):
    reference = quantized(tiny_model(name), tmp_path, VARIANTS["8 bits, groups"])
    check_logits(start(tmp_path), reference)


def changed(weights: object = None, activations: object = None, **others: object) -> dict:
    settings = VARIANTS["w8a8"].settings()
    group = settings["config_groups"]["group_0"]
    group["weights"] |= weights or {}
    group["input_activations"] = group["input_activations"] | (activations or {})
    return settings | others


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (changed(format="nvfp4-pack-quantized"), "in the format nvfp4-pack-quantized"),
        (changed(format="marlin-24"), "in the format marlin-24"),
        (changed({"num_bits": 2}), "to int of 2 bits"),
        (changed({"strategy": "block"}), "with weights by block"),
        (changed(None, {"dynamic": False, "strategy": "tensor"}), "static activations by tensor"),
        (changed(None, {"symmetric": False}), "activations that have zero points"),
        (changed(None, {"type": "float"}), "of different types"),
        (changed({"num_bits": 4}), "of different types"),
        (changed(kv_cache_scheme={"num_bits": 8}), "scales for the KV cache"),
        (changed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (changed(config_groups={}), "without groups"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tiny_model: TinyModels, tmp_path, settings, reason):
    write(tmp_path, tiny_model("llama"), settings, {"x": torch.zeros(1)})
    with pytest.raises(ModelError, match=reason):
        start(tmp_path)


def test_a_layer_that_lacks_its_scale_is_refused_with_its_name(tiny_model: TinyModels, tmp_path):
    quantized(tiny_model("llama"), tmp_path, VARIANTS["w8a8"])
    tensors, path = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj"
    del tensors[f"{path}.weight_scale"]
    write(tmp_path, tiny_model("llama"), VARIANTS["w8a8"].settings(), tensors)
    with pytest.raises(ModelError, match=f"{path} .*lacks 'weight_scale'"):
        start(tmp_path)


def test_the_format_s_own_library_agrees_on_packing():
    """Where it is installed; it is not needed for anything else."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        low = -(2 ** (bits - 1))
        values = torch.randint(low, -low, (16, 64)).to(torch.int8)
        assert torch.equal(packed(values, bits), helpers.pack_to_int32(values, bits))
        across = packed(values.T.contiguous(), bits).T
        assert torch.equal(across, helpers.pack_to_int32(values, bits, packed_dim=0))
