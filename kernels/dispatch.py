"""The one way to a kernel: an op checks its arguments and calls what was chosen for the device.

Chosen once per device. A Triton module is imported only when it is chosen, so a CPU worker needs no triton; today
every device gets the plain-torch twins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels import reference, sampling
from kernels.batch import PagedBatch, Slots

SUPPORTED_HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})
"""16 and 32 exist for small models on a CPU."""
SUPPORTED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

Kernel = Callable[..., Any]


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

    def sample(self, logits: torch.Tensor, draws: sampling.DrawTensors) -> torch.Tensor:
        assert logits.dim() == 2, logits.shape
        assert logits.dtype == torch.float32, logits.dtype
        assert len(draws.seeds) == len(logits), (len(draws.seeds), len(logits))
        return self.chosen["sample"](logits, draws)


def choose(device: torch.device) -> Ops:
    """The ops of a device. The twins run everywhere; a compiled kernel takes a twin's place here."""
    twins: dict[str, Kernel] = {
        "kv_write": reference.kv_write,
        "attention_decode": reference.attention_decode,
        "attention_prefill": reference.attention_prefill,
        "block_copy": reference.block_copy,
        "sample": sampling.sample,
    }
    return Ops(device, twins)


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
