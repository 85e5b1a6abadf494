"""Reads compressed-tensors checkpoints: 4 or 8 packed bits by group, int8 and e4m3 with or without activations of 8
bits.

It knows that format's settings and tensors. It does not know which layers a model has: a layer that the checkpoint
leaves exact is recognised by its tensors.

Packed numbers lie along the inputs, lowest bits first, increased by half their range; zero points lie along the outputs
and are increased too. Scales are `[out, groups]`, `[out, 1]`, or one for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.reference.linear import unpack_words
from workers.engine.checkpoint.checkpoint import Stored
from workers.engine.checkpoint.stored_gptq import Tensors, grouped, refuse_shape
from workers.engine.layers.quant import Channels, Kind, Numbers, channels
from workers.engine.sizing.capacity import Format

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_EIGHT_BITS = {"I8", "F8_E4M3"}

Arguments = dict[str, Any]
"""Settings of weights or of activations."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are stored alike. Each of `targets` is a class of layers, a name, or `re:` and a pattern."""

    targets: tuple[str, ...]
    weights: Arguments
    activations: Arguments | None

    @property
    def kind(self) -> Kind:
        if self.weights["type"] == "float":
            return "fp8"
        return "int8" if self.activations is None else "w8a8"

    def names(self, path: str) -> bool:
        return any(
            re.match(target[3:], path) is not None if target.startswith("re:") else target == path
            for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class CompressedScheme:
    groups: tuple[Group, ...]
    method: str = "compressed-tensors"

    @property
    def counts_as(self) -> Format:
        return "int4" if all(group.weights["num_bits"] == 4 for group in self.groups) else "int8"

    def takes(self, suffix: str, stored: Stored) -> bool:
        return suffix in _SUFFIXES or (suffix == "weight" and stored.dtype in _EIGHT_BITS)

    def numbers(self, tensors: Tensors, in_features: int, out_features: int, path: str) -> Numbers:
        group = self._group(path)
        if "weight_packed" in tensors:
            return _packed(tensors, group, in_features, out_features)
        return _channels(tensors, group, in_features, out_features)

    def _group(self, path: str) -> Group:
        """Returns the group of a layer; a match by name has priority over a match by class. Raises ValueError if there
        is none."""
        for group in self.groups:
            if group.names(path):
                return group
        for group in self.groups:
            if "Linear" in group.targets:
                return group
        raise ValueError("no group of its settings names it")


def scheme(settings: dict[str, Any]) -> CompressedScheme:
    return CompressedScheme(tuple(_groups(settings)))


def faults(settings: dict[str, Any]) -> Iterator[str]:
    """Yields each property of the settings that is not supported."""
    if settings.get("kv_cache_scheme"):
        yield "with scales for the KV cache, which are not supported"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        yield f"and sparse ({settings['sparsity_config']['format']}), which is not supported"
    if settings.get("transform_config"):
        yield "with transforms of activations, which are not supported"
    configs = settings.get("config_groups") or {}
    for config in configs.values():
        layout = config.get("format") or settings.get("format")
        if layout not in _FORMATS:
            yield f"in the format {layout}, which is not supported"
    for group in _groups(settings):
        yield from _weight_faults(group.weights)
        if group.activations is not None:
            yield from _activation_faults(group)
    if not configs:
        yield "without groups of layers"


def _groups(settings: dict[str, Any]) -> Iterator[Group]:
    for config in (settings.get("config_groups") or {}).values():
        weights = {"type": "int", "symmetric": True} | (config.get("weights") or {})
        yield Group(tuple(config.get("targets") or ()), weights, config.get("input_activations"))


def _weight_faults(weights: Arguments) -> Iterator[str]:
    kind, bits, strategy = weights["type"], weights.get("num_bits"), weights.get("strategy")
    if (kind, bits) not in {("int", 4), ("int", 8), ("float", 8)}:
        yield f"to {kind} of {bits} bits, and only int of 4 or 8 and float of 8 are supported"
    if strategy not in ("tensor", "channel", "group"):
        yield f"with weights by {strategy}, which is not supported"


def _activation_faults(group: Group) -> Iterator[str]:
    given, weights = group.activations, group.weights
    assert given is not None
    if given.get("dynamic") is not True or given.get("strategy") != "token":
        how = "dynamic" if given.get("dynamic") else "static"
        yield f"with {how} activations by {given.get('strategy')}: only dynamic ones by token are supported"
    if not given.get("symmetric", True):
        yield "with activations that have zero points, which are not supported"
    same = (given.get("type", "int"), given.get("num_bits"), 8)
    if same != (weights["type"], 8, weights.get("num_bits")):
        yield "with weights and activations of different types, which are not supported"


def _packed(tensors: Tensors, group: Group, in_features: int, out_features: int) -> Numbers:
    bits, packed, scale = (group.weights["num_bits"], tensors["weight_packed"], tensors["weight_scale"])
    refuse_shape("weight_packed", packed, (out_features, in_features * bits // 32))
    if group.activations is not None:
        raise ValueError("packed weights with activations of 8 bits are not supported")
    scale = scale.reshape(-1, 1) if scale.numel() == 1 else scale
    scale = scale.expand(out_features, -1).T.contiguous()
    zero = None
    if (stored := tensors.get("weight_zero_point")) is not None:
        refuse_shape("weight_zero_point", stored, (out_features * bits // 32, len(scale)))
        zero = unpack_words(stored, bits).T
    return grouped(packed.T.contiguous(), scale, zero, tensors.get("weight_g_idx"), bits)


def _channels(tensors: Tensors, group: Group, in_features: int, out_features: int) -> Channels:
    weight, scale = tensors["weight"], tensors["weight_scale"]
    refuse_shape("weight", weight, (out_features, in_features))
    if (tensors.get("weight_zero_point", torch.zeros(1)) != 0).any():
        raise ValueError("8-bit weights with zero points are not supported unless they are packed")
    if scale.numel() not in (1, out_features):
        raise ValueError(f"weight_scale has shape {list(scale.shape)}")
    if weight.is_floating_point() != (group.kind == "fp8"):
        raise ValueError(f"weight is {weight.dtype}")
    scale = scale.float().reshape(-1).expand(out_features).contiguous()
    return channels(group.kind, weight.contiguous(), scale)
