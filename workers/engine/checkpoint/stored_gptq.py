"""Reads checkpoints whose linear layers are stored in 4 or 8 bits: GPTQ's and AWQ's tensors, repacked once for
`linear_w4`.

It knows the two layouts and the names of their tensors. It does not know products or which layers a model has. Numbers
stay as the checkpoint has them, bit for bit; nothing is rounded again.

GPTQ (arXiv 2210.17323) packs eight inputs of a column (four of 8 bits) into an int32, lowest bits first; zero points
pack eight outputs and are stored one too low in the first version of the format. `g_idx` holds each input's group: with
activation order (`desc_act`) neighbours are in different groups, and inputs are sorted by group. AWQ (arXiv 2306.00978)
packs eight outputs of an input, in the order of `_AWQ_COLUMNS`, and zero points in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.reference.linear import GROUPS, pack_words, sort_groups, symmetric_zero, unpack_words
from workers.engine.checkpoint.checkpoint import Stored
from workers.engine.layers.quant import Packed
from workers.engine.sizing.capacity import Format

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_BITS = {"gptq": (4, 8), "awq": (4,)}
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, among every eight, that each position of an int32 holds."""
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
"""The supported layouts of each method; the first one is used if none is named."""

Tensors = dict[str, torch.Tensor]
"""The tensors of one layer, by suffix."""


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """The scheme of GPTQ and of AWQ."""

    method: str
    layout: str
    bits: int

    @property
    def counts_as(self) -> Format:
        return "int4" if self.bits == 4 else "int8"

    def takes(self, suffix: str, stored: Stored) -> bool:
        return suffix in SUFFIXES

    def numbers(self, tensors: Tensors, in_features: int, out_features: int, path: str) -> Packed:
        if self.method == "awq":
            return _awq(tensors, in_features, out_features)
        return _gptq(tensors, in_features, out_features, self.layout, self.bits)


def scheme(settings: dict[str, Any]) -> GptqScheme:
    method = settings["quant_method"]
    return GptqScheme(method, _layout(settings, method), settings.get("bits", 4))


def faults(settings: dict[str, Any]) -> Iterator[str]:
    """Yields each property of the settings that is not supported."""
    method, bits = settings["quant_method"], settings.get("bits", 4)
    if bits not in _BITS[method]:
        known = " and ".join(map(str, _BITS[method]))
        yield f"to {bits} bits, and only {known} are supported"
    if (layout := _layout(settings, method)) not in _FORMATS[method]:
        yield f"in the layout {layout}, which is not supported"


def _layout(settings: dict[str, Any], method: str) -> str:
    named = settings.get("checkpoint_format" if method == "gptq" else "version")
    return str(named or settings.get("format") or _FORMATS[method][0]).lower()


def _gptq(tensors: Tensors, in_features: int, out_features: int, layout: str, bits: int) -> Packed:
    word = 32 // bits
    weight, scale = tensors["qweight"], tensors["scales"]
    refuse_shape("qweight", weight, (in_features // word, out_features))
    refuse_shape("scales", scale, (len(scale), out_features))
    zero = None
    if (packed := tensors.get("qzeros")) is not None:
        refuse_shape("qzeros", packed, (len(scale), out_features // word))
        # The ones are added over the whole word: writers subtract them in the same way, so a zero point of 0 borrows
        # and returns.
        ones = sum(1 << place for place in range(0, 32, bits))
        words = packed if layout == "gptq_v2" else _wrapped(packed.to(torch.int64) + ones)
        zero = _unpacked_columns(words, bits=bits)
    return grouped(weight, scale, zero, tensors.get("g_idx"), bits)


def grouped(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, groups: torch.Tensor | None, bits: int
) -> Packed:
    """Packs a weight. `groups` has the group of each input, if they are not in order."""
    if groups is None or bool((groups < 0).any()):  # -1 marks groups that are in order
        return _packed(weight, scale, zero, None, bits)
    in_features = 32 // bits * len(weight)
    refuse_shape("g_idx", groups, (in_features,))
    size, order = _group_size(in_features, len(scale)), None
    plain = torch.arange(in_features, device=groups.device) // size
    sizes = torch.bincount(groups.clamp(0, len(scale) - 1), minlength=len(scale))
    if not bool((sizes == size).all()):
        raise ValueError("its groups (g_idx) are not of equal size")
    if not torch.equal(groups.to(plain.dtype), plain):
        weight, order = sort_groups(weight, groups, bits)
    return _packed(weight, scale, zero, order, bits)


def _awq(tensors: Tensors, in_features: int, out_features: int) -> Packed:
    weight, scale = tensors["qweight"], tensors["scales"]
    refuse_shape("qweight", weight, (in_features, out_features // 8))
    refuse_shape("scales", scale, (len(scale), out_features))
    zero = None
    if (packed := tensors.get("qzeros")) is not None:
        refuse_shape("qzeros", packed, (len(scale), out_features // 8))
        zero = _unpacked_columns(packed, _AWQ_COLUMNS)
    return _packed(pack_words(_unpacked_columns(weight, _AWQ_COLUMNS)), scale, zero, None, 4)


def _packed(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, order: torch.Tensor | None, bits: int
) -> Packed:
    """Packs a weight; groups longer than the op supports are cut into several with the same scale."""
    size = _group_size(32 // bits * len(weight), len(scale))
    known = [group for group in GROUPS if size % group == 0]
    if not known:
        raise ValueError(f"its groups of {size} cannot be cut into groups of {GROUPS[0]}")
    times = size // max(known)
    if zero is not None:
        symmetric = bool((zero == symmetric_zero(bits)).all())
        small = zero.to(torch.int8 if bits == 4 else torch.uint8)
        zero = None if symmetric else _repeated(small, times)
    return Packed(weight.contiguous(), _repeated(scale, times), zero, order, bits)


def _group_size(in_features: int, num_groups: int) -> int:
    if in_features % num_groups:
        raise ValueError(f"{num_groups} groups do not divide {in_features} inputs")
    return in_features // num_groups


def _repeated(values: torch.Tensor, times: int) -> torch.Tensor:
    return values.repeat_interleave(times, dim=0).contiguous()


def _unpacked_columns(packed: torch.Tensor, columns: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> torch.Tensor:
    """Unpacks int32 `[n, out · bits / 32]` to int32 `[n, out]`; `columns` has the column of a word that each position
    holds."""
    word = 32 // bits
    places = unpack_words(packed.T.contiguous(), bits).T.reshape(len(packed), -1, word)
    place_of = [columns.index(column) for column in range(word)]
    return places[:, :, place_of].reshape(len(packed), -1)


def _wrapped(words: torch.Tensor) -> torch.Tensor:
    """Converts int64 to int32, modulo 2³²."""
    words = words & 0xFFFFFFFF
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def refuse_shape(name: str, tensor: torch.Tensor, needed: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != needed:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(needed)}")
