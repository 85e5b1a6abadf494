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

from kernels.batch import DeviceRows, PagedBatch, Slots, StepInputs
from kernels.reference import attention, norm, rows, sample

SUPPORTED_HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})
"""16 and 32 exist for small models on a CPU."""
SUPPORTED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

Kernel = Callable[..., Any]

TWINS: dict[str, Kernel] = {
    "kv_write": attention.kv_write,
    "attention_decode": attention.attention_decode,
    "attention_prefill": attention.attention_prefill,
    "block_copy": attention.block_copy,
    "advance_rows": rows.advance_rows,
    "input_prep": rows.input_prep,
    "rms_norm": norm.rms_norm,
    "sample": sample.sample,
}
COMPILED: dict[str, str] = {
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
    ) -> None:
        assert batch.starts[-1] == batch.num_rows, "a decode row has one query"
        _check_attention(out, query, kv, batch)
        self.chosen["attention_decode"](out, query, kv, batch, scale, window, softcap, sinks)

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
    ) -> None:
        _check_attention(out, query, kv, batch)
        self.chosen["attention_prefill"](out, query, kv, batch, scale, window, softcap, sinks)

    def block_copy(self, kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        assert kv.dim() == 6, kv.shape
        assert source.shape == target.shape, (source.shape, target.shape)
        self.chosen["block_copy"](kv, source, target)

    def advance_rows(self, rows: DeviceRows, active: torch.Tensor, tokens: torch.Tensor) -> None:
        self.chosen["advance_rows"](rows, active, tokens)

    def input_prep(
        self, inputs: StepInputs, rows: DeviceRows, active: torch.Tensor, block_size: int
    ) -> None:
        self.chosen["input_prep"](inputs, rows, active, block_size)

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


def _check_kv(kv: torch.Tensor) -> None:
    assert kv.dim() == 5, kv.shape
    assert kv.shape[1] == 2, kv.shape
    assert kv.is_contiguous(), kv.stride()
    assert kv.dtype in SUPPORTED_DTYPES, kv.dtype
    assert kv.shape[4] in SUPPORTED_HEAD_DIMS, kv.shape


def _check_attention(
    out: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch
) -> None:
    _check_kv(kv)
    assert out.shape == query.shape, (out.shape, query.shape)
    assert query.shape[0] == batch.starts[-1], (query.shape, batch.starts)
    assert query.shape[1] % kv.shape[2] == 0, (query.shape, kv.shape)
    assert query.shape[2] == kv.shape[4], (query.shape, kv.shape)
    assert query.dtype == out.dtype == kv.dtype, (query.dtype, out.dtype, kv.dtype)
    assert query.stride(2) == 1, query.stride()
    assert out.stride(2) == 1, out.stride()
    assert batch.block_size == kv.shape[3], (batch.block_size, kv.shape)
