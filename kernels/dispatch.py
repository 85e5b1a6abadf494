"""The one way to a kernel: an op checks its arguments and calls what was chosen for the device.

Chosen once per device: a GPU gets the Triton kernels, a CPU their plain-torch twins. A Triton module is imported only
when it is chosen, so a CPU worker needs no triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from kernels.batch import PagedBatch, Slots
from kernels.reference import attention, norm, sample
from kernels.shared import SharedGroups

SUPPORTED_HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})
"""16 and 32 exist for small models on a CPU."""
SUPPORTED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
QUANTIZED_DTYPES = frozenset({torch.int8, torch.float8_e4m3fn})
"""Of KV that goes with scales."""

Kernel = Callable[..., Any]

TWINS: dict[str, Kernel] = {
    "kv_write": attention.kv_write,
    "attention_decode": attention.attention_decode,
    "attention_prefill": attention.attention_prefill,
    "attention_shared": attention.attention_shared,
    "block_copy": attention.block_copy,
    "rms_norm": norm.rms_norm,
    "sample": sample.sample,
}
COMPILED: dict[str, str] = {
    "attention_decode": "kernels.attention_decode",
    "attention_prefill": "kernels.attention_prefill",
    "attention_shared": "kernels.attention_shared",
    "rms_norm": "kernels.norm",
}
"""Op name to the Triton module that has a function of the same name and signature."""


@dataclass(frozen=True)
class Ops:
    """The kernels of one device behind their checks. A wrong argument is our own mistake: assert."""

    device: torch.device
    chosen: dict[str, Kernel]
    """Kernel name to what was chosen, for the log and the tests."""

    def kv_write(
        self, kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: Slots
    ) -> None:
        _check_kv(kv)
        assert slots.block_size == kv.shape[3], (slots.block_size, kv.shape)
        assert key.shape == value.shape == (len(slots), kv.shape[2], kv.shape[4]), key.shape
        assert key.dtype == value.dtype == kv.dtype, key.dtype
        self.chosen["kv_write"](kv, key, value, slots)

    def attention_decode(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> None:
        assert batch.starts[-1] == batch.num_rows, "a decode row has one query"
        _check_attention(out, query, kv, batch, kv_scales)
        _check_heads(query, sinks, lse)
        self.chosen["attention_decode"](
            out, query, kv, batch, scale, window, softcap, sinks, kv_scales, lse
        )

    def attention_prefill(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
    ) -> None:
        assert scale > 0.0, scale
        _check_attention(out, query, kv, batch, kv_scales)
        _check_heads(query, sinks, None)
        if tree is not None:
            assert tree.shape == query.shape[:1], (tree.shape, query.shape)
            assert tree.dtype == torch.int64, tree.dtype
            assert window == 0, "nodes of a tree have no place in a window"
            assert max(batch.query_lens, default=0) <= 64, batch.query_lens
        self.chosen["attention_prefill"](
            out, query, kv, batch, scale, window, softcap, sinks, kv_scales, tree
        )

    def attention_shared(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        batch: PagedBatch,
        groups: SharedGroups,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        assert batch.starts[-1] == batch.num_rows == len(groups.own_starts), "one query per row"
        _check_attention(out, query, kv, batch, kv_scales)
        _check_heads(query, sinks, None)
        self.chosen["attention_shared"](
            out, query, kv, batch, groups, scale, softcap, sinks, kv_scales
        )

    def block_copy(self, kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        assert kv.dim() == 6, kv.shape
        assert source.shape == target.shape, (source.shape, target.shape)
        self.chosen["block_copy"](kv, source, target)

    def rms_norm(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> None:
        assert x.dim() == 2, x.shape
        assert x.is_contiguous(), x.stride()
        assert weight.shape == x.shape[1:], (weight.shape, x.shape)
        assert out.shape == x.shape, (out.shape, x.shape)
        assert residual is None or residual.shape == x.shape, x.shape
        self.chosen["rms_norm"](out, x, weight, eps, residual)

    def sample(self, logits: torch.Tensor, draws: sample.DrawTensors) -> torch.Tensor:
        assert logits.dim() == 2, logits.shape
        assert logits.dtype == torch.float32, logits.dtype
        assert len(draws.seeds) == len(logits), (len(draws.seeds), len(logits))
        return self.chosen["sample"](logits, draws)


def choose(device: torch.device, compiled: Collection[str] | None = None) -> Ops:
    """The ops of a device. `compiled`: names of those that take the Triton kernel; None: all on a GPU, none on a CPU.
    Named on a CPU they run in Triton's interpreter, which tests use."""
    if compiled is None:
        compiled = COMPILED if device.type == "cuda" else ()
    chosen = dict(TWINS)
    for name in compiled:
        chosen[name] = getattr(importlib.import_module(COMPILED[name]), name)
    return Ops(device, chosen)


def _check_kv(kv: torch.Tensor, kv_scales: torch.Tensor | None = None) -> None:
    assert kv.dim() == 5, kv.shape
    assert kv.shape[1] == 2, kv.shape
    assert kv.is_contiguous(), kv.stride()
    assert kv.shape[4] in SUPPORTED_HEAD_DIMS, kv.shape
    if kv_scales is None:
        assert kv.dtype in SUPPORTED_DTYPES, kv.dtype
        return
    assert kv.dtype in QUANTIZED_DTYPES, kv.dtype
    assert kv_scales.dtype == torch.float32, kv_scales.dtype
    assert kv_scales.shape == kv.shape[:4], (kv_scales.shape, kv.shape)
    assert kv_scales.is_contiguous(), kv_scales.stride()


def _check_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    kv_scales: torch.Tensor | None = None,
) -> None:
    _check_kv(kv, kv_scales)
    assert out.shape == query.shape, (out.shape, query.shape)
    assert query.shape[0] == batch.starts[-1], (query.shape, batch.starts)
    assert query.shape[1] % kv.shape[2] == 0, (query.shape, kv.shape)
    assert query.shape[2] == kv.shape[4], (query.shape, kv.shape)
    assert query.dtype == out.dtype, (query.dtype, out.dtype)
    assert query.dtype == kv.dtype or kv_scales is not None, (query.dtype, kv.dtype)
    assert query.dtype in SUPPORTED_DTYPES, query.dtype
    assert query.stride(2) == 1, query.stride()
    assert out.stride(2) == 1, out.stride()
    assert batch.block_size == kv.shape[3], (batch.block_size, kv.shape)


def _check_heads(query: torch.Tensor, sinks: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    if sinks is not None:
        assert sinks.shape == query.shape[1:2], (sinks.shape, query.shape)
        assert sinks.is_contiguous(), sinks.stride()
    if lse is not None:
        assert lse.shape == query.shape[:2] and lse.is_contiguous(), (lse.shape, query.shape)
        assert lse.dtype == torch.float32, lse.dtype
