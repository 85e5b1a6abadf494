"""Checkpoints whose linear layers are stored in 4 bits: GPTQ's and AWQ's tensors, repacked once for `linear_w4`.

Knows the two layouts and the names of their tensors. Does not know products or which layers a model has. Numbers stay
what the checkpoint says, bit for bit; nothing is rounded again.

GPTQ (arXiv 2210.17323) packs eight inputs of a column into an int32, lowest bits first; zero points pack eight outputs
and are stored one too low in the first version of the format. `g_idx` names each input's group: with activation order
(`desc_act`) neighbours are of different groups, and inputs are sorted by group. AWQ (arXiv 2306.00978) packs eight
outputs of an input, in the order of `_AWQ_COLUMNS`, and zero points in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from kernels.reference.linear import GROUPS, SYMMETRIC_ZERO, pack_int4, sort_groups, unpack_int4
from workers.engine.errors import ModelError
from workers.engine.layers.quant import Int4

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_BITS = 4
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of every eight, that each place of an int32 holds."""
_ONES = 0x11111111
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
"""Method → the layouts of it that are read; the first where none is named."""

Tensors = dict[str, torch.Tensor]
"""Of one layer, by suffix."""


@dataclass(frozen=True, slots=True)
class Scheme:
    method: str
    layout: str

    def int4(self, tensors: Tensors, in_features: int, out_features: int, path: str) -> Int4:
        """Raises ModelError if the tensors are not those of a layer of this size."""
        read = _gptq if self.method == "gptq" else _awq
        try:
            return read(tensors, in_features, out_features, self.layout)
        except (ValueError, KeyError) as error:
            lacking = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ModelError(
                f"The layer {path} of the checkpoint cannot be read as {self.method}: {lacking}."
            ) from error


def reasons(config: PreTrainedConfig) -> Iterator[str]:
    """Why the checkpoint's quantized weights cannot be read."""
    settings = _settings(config)
    if settings is None:
        return
    method = settings.get("quant_method") or "unknown"
    if method not in _FORMATS:
        yield f"its weights are quantized ({method}), which is not supported"
        return
    if (bits := settings.get("bits", _BITS)) != _BITS:
        yield f"its weights are quantized ({method}) to {bits} bits, and only 4 are supported"
    if (layout := _layout(settings, method)) not in _FORMATS[method]:
        yield f"its weights are quantized ({method}) in the layout {layout}, which is not supported"


def scheme_of(config: PreTrainedConfig) -> Scheme | None:
    """None for exact weights. For configurations without `reasons`."""
    settings = _settings(config)
    if settings is None:
        return None
    method = settings["quant_method"]
    return Scheme(method, _layout(settings, method))


def refuse_beside(scheme: Scheme | None, rounding: str, num_ranks: int) -> None:
    """Raises ModelError for what quantized checkpoints do not go together with."""
    if scheme is None:
        return
    if rounding != "none":
        raise ModelError(
            f"The checkpoint is quantized already ({scheme.method}): HEADGATE_ENGINE_QUANT={rounding} cannot be added."
        )
    if num_ranks > 1:
        raise ModelError(
            f"The checkpoint is quantized ({scheme.method}): it cannot be split over {num_ranks} ranks."
        )


def _settings(config: PreTrainedConfig) -> dict[str, Any] | None:
    settings = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else settings.to_dict()


def _layout(settings: dict[str, Any], method: str) -> str:
    named = settings.get("checkpoint_format" if method == "gptq" else "version")
    return str(named or settings.get("format") or _FORMATS[method][0]).lower()


def _gptq(tensors: Tensors, in_features: int, out_features: int, layout: str) -> Int4:
    weight, scale = tensors["qweight"], tensors["scales"]
    _refuse_shape("qweight", weight, (in_features // 8, out_features))
    _refuse_shape("scales", scale, (len(scale), out_features))
    zero = None
    if (packed := tensors.get("qzeros")) is not None:
        _refuse_shape("qzeros", packed, (len(scale), out_features // 8))
        # Over the whole word: writers take the ones away in the same way, so a zero point of 0 borrows and returns.
        words = packed if layout == "gptq_v2" else _wrapped(packed.to(torch.int64) + _ONES)
        zero = _unpacked_columns(words)
    order, groups = None, tensors.get("g_idx")
    if groups is not None:
        _refuse_shape("g_idx", groups, (in_features,))
        size = _group_size(in_features, len(scale))
        plain = torch.arange(in_features, device=groups.device) // size
        sizes = torch.bincount(groups.clamp(0, len(scale) - 1), minlength=len(scale))
        if not bool((sizes == size).all()):
            raise ValueError("its groups (g_idx) are not of equal size")
        if not torch.equal(groups.to(plain.dtype), plain):
            weight, order = sort_groups(weight, groups)
    return _int4(weight, scale, zero, order)


def _awq(tensors: Tensors, in_features: int, out_features: int, layout: str) -> Int4:
    weight, scale = tensors["qweight"], tensors["scales"]
    _refuse_shape("qweight", weight, (in_features, out_features // 8))
    _refuse_shape("scales", scale, (len(scale), out_features))
    zero = None
    if (packed := tensors.get("qzeros")) is not None:
        _refuse_shape("qzeros", packed, (len(scale), out_features // 8))
        zero = _unpacked_columns(packed, _AWQ_COLUMNS)
    return _int4(pack_int4(_unpacked_columns(weight, _AWQ_COLUMNS)), scale, zero, None)


def _int4(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    order: torch.Tensor | None,
) -> Int4:
    """Groups longer than the op knows are cut into several with the same scale."""
    size = _group_size(8 * len(weight), len(scale))
    known = [group for group in GROUPS if size % group == 0]
    if not known:
        raise ValueError(f"its groups of {size} cannot be cut into groups of {GROUPS[0]}")
    times = size // max(known)
    if zero is not None:
        symmetric = bool((zero == SYMMETRIC_ZERO).all())
        zero = None if symmetric else _repeated(zero.to(torch.int8), times)
    return Int4(weight.contiguous(), _repeated(scale, times), zero, order)


def _group_size(in_features: int, num_groups: int) -> int:
    if in_features % num_groups:
        raise ValueError(f"{num_groups} groups do not divide {in_features} inputs")
    return in_features // num_groups


def _repeated(values: torch.Tensor, times: int) -> torch.Tensor:
    return values.repeat_interleave(times, dim=0).contiguous()


def _unpacked_columns(
    packed: torch.Tensor, columns: tuple[int, ...] = tuple(range(8))
) -> torch.Tensor:
    """int32 `[n, out / 8]` → int32 `[n, out]` in 0…15; `columns`: which of eight each place holds."""
    places = unpack_int4(packed.T.contiguous()).T.reshape(len(packed), -1, 8)
    place_of = [columns.index(column) for column in range(8)]
    return places[:, :, place_of].reshape(len(packed), -1)


def _wrapped(words: torch.Tensor) -> torch.Tensor:
    """int64 → int32, modulo 2³²."""
    words = words & 0xFFFFFFFF
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _refuse_shape(name: str, tensor: torch.Tensor, needed: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != needed:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(needed)}")
