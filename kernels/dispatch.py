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
from kernels.draws import DrawTensors, EditTensors, Workspace, geometry, num_words
from kernels.reference import attention, logits, norm, sample

SUPPORTED_HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})
"""16 and 32 exist for small models on a CPU."""
SUPPORTED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

Kernel = Callable[..., Any]

TWINS: dict[str, Kernel] = {
    "kv_write": attention.kv_write,
    "attention_decode": attention.attention_decode,
    "attention_prefill": attention.attention_prefill,
    "block_copy": attention.block_copy,
    "count_tokens": logits.count_tokens,
    "logits": logits.logits,
    "rms_norm": norm.rms_norm,
    "sample": sample.sample,
    "top_logprobs": sample.top_logprobs,
    "verify": sample.verify,
}
COMPILED: dict[str, str] = {
    "count_tokens": "kernels.logits",
    "logits": "kernels.logits",
    "rms_norm": "kernels.norm",
    "sample": "kernels.sample",
    "verify": "kernels.sample",
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

    def count_tokens(self, counts: torch.Tensor, lines: torch.Tensor, tokens: torch.Tensor) -> None:
        assert counts.dim() == 2, counts.shape
        assert counts.is_contiguous(), counts.stride()
        assert counts.dtype == lines.dtype == torch.int32, (counts.dtype, lines.dtype)
        assert lines.shape == tokens.shape, (lines.shape, tokens.shape)
        self.chosen["count_tokens"](counts, lines, tokens)

    def logits(
        self,
        out: torch.Tensor,
        raw: torch.Tensor,
        edits: EditTensors,
        temperature: torch.Tensor,
        workspace: Workspace | None = None,
    ) -> None:
        _check_rows(out, workspace)
        _check_rows(raw, workspace)
        assert out.shape == raw.shape, (out.shape, raw.shape)
        assert out.data_ptr() != raw.data_ptr(), "raw logits are needed for logprobs"
        _check_edits(edits, *raw.shape)
        self.chosen["logits"](out, raw, edits, temperature, workspace)

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

    def sample(
        self,
        logits: torch.Tensor,
        draws: DrawTensors,
        tokens: torch.Tensor | None = None,
        logprobs: torch.Tensor | None = None,
        raw: torch.Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        _check_rows(logits, workspace)
        rows = len(logits)
        assert len(draws.seeds) == len(draws.temperature) == rows, (draws.seeds.shape, rows)
        assert draws.seeds.is_contiguous(), draws.seeds.stride()
        assert tokens is None or (tokens.shape, tokens.dtype) == ((rows,), torch.int64)
        assert logprobs is None or (logprobs.shape, logprobs.dtype) == ((rows,), torch.float32)
        assert raw is None or raw.shape == logits.shape, (raw.shape, logits.shape)
        return self.chosen["sample"](logits, draws, tokens, logprobs, raw, workspace)

    def sample_workspace(self, max_rows: int, vocab: int) -> Workspace:
        """Buffers for `logits` and `sample` of up to so many rows; a step that is captured needs them."""
        return Workspace.create(max_rows, geometry(vocab), self.device)

    def top_logprobs(self, values: torch.Tensor, tokens: torch.Tensor, raw: torch.Tensor) -> None:
        assert values.shape == tokens.shape, (values.shape, tokens.shape)
        assert len(raw) == len(tokens), (raw.shape, tokens.shape)
        assert tokens.shape[1] <= raw.shape[1], (tokens.shape, raw.shape)
        self.chosen["top_logprobs"](values, tokens, raw)

    def verify(
        self,
        accepted: torch.Tensor,
        following: torch.Tensor,
        draws: torch.Tensor,
        proposals: torch.Tensor,
        numbers: torch.Tensor,
    ) -> None:
        rows, most = proposals.shape
        assert draws.shape == (rows, most + 1), (draws.shape, proposals.shape)
        assert accepted.shape == following.shape == numbers.shape == (rows,), accepted.shape
        assert draws.dtype == proposals.dtype == following.dtype == torch.int64, draws.dtype
        assert draws.is_contiguous(), draws.stride()
        assert proposals.is_contiguous(), proposals.stride()
        self.chosen["verify"](accepted, following, draws, proposals, numbers)


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


def _check_rows(logits: torch.Tensor, workspace: Workspace | None) -> None:
    assert logits.dim() == 2, logits.shape
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    if workspace is not None:
        cut = workspace.geometry
        assert len(workspace.bounds) >= len(logits), logits.shape
        assert cut.segments * cut.segment_size >= logits.shape[1], (cut, logits.shape)


def _check_edits(edits: EditTensors, rows: int, vocab: int) -> None:
    lines = (edits.penalty_lines, edits.mask_lines)
    assert all(len(line) == rows and line.dtype == torch.int32 for line in lines), rows
    assert edits.counts.shape[1] == vocab, (edits.counts.shape, vocab)
    words = (edits.prompt_bits.shape[1], edits.mask_bits.shape[1])
    assert words == (num_words(vocab),) * 2, (words, vocab)
    assert len(edits.prompt_bits) == len(edits.counts), edits.prompt_bits.shape
    assert edits.bias_tokens.shape == edits.biases.shape, edits.biases.shape
    assert len(edits.biases) == rows, (edits.biases.shape, rows)
    tables = (edits.counts, edits.prompt_bits, edits.mask_bits, edits.bias_tokens, edits.biases)
    assert all(table.is_contiguous() for table in tables)


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
