"""Assertions of ops about their tensors. A wrong argument is our own mistake, so nothing here is an error for callers.

It knows shapes, dtypes and strides. Only `check_targets` reads contents.
"""

from __future__ import annotations

import torch

from kernels.arguments.batch import DeviceRows, PagedBatch
from kernels.arguments.draws import EditTensors, Workspace, num_words
from kernels.reference.quant import is_quantized

SUPPORTED_HEAD_DIMS = frozenset({16, 32, 64, 80, 96, 128, 256})
"""Head sizes that the kernels support; 16 and 32 exist for small models on a CPU."""
SUPPORTED_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def is_index(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def check_scales(kv: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    if kv_scales is None:
        assert kv.dtype in SUPPORTED_DTYPES, kv.dtype
        return
    assert is_quantized(kv.dtype), kv.dtype
    assert kv_scales.dtype == torch.float32, kv_scales.dtype
    assert kv_scales.shape == kv.shape[:-1], (kv_scales.shape, kv.shape)
    assert kv_scales.is_contiguous(), kv_scales.stride()


def check_layers(kv: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """Checks the KV of all layers, or blocks packed over all layers."""
    assert kv.dim() == 6, kv.shape
    assert kv.is_contiguous(), kv.stride()
    check_scales(kv, kv_scales)


def check_staging(
    staging: torch.Tensor,
    kv: torch.Tensor,
    ids: torch.Tensor,
    staging_scales: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
) -> None:
    check_layers(kv, kv_scales)
    check_layers(staging, staging_scales)
    assert staging.dtype == kv.dtype, (staging.dtype, kv.dtype)
    assert staging.shape == (len(ids), kv.shape[0], *kv.shape[2:]), (staging.shape, kv.shape)


def check_targets(ids: torch.Tensor) -> None:
    """Checks that no block is written twice. The host waits for the device if the ids are there."""
    assert len(ids.unique()) == len(ids), "a block is written twice"


def check_out(out: torch.Tensor, scales: torch.Tensor | None) -> None:
    assert out.is_contiguous(), out.stride()
    assert is_quantized(out.dtype) == (scales is not None), out.dtype
    assert scales is None or scales.shape == out.shape[:1], (scales, out.shape)
    assert scales is None or scales.dtype == torch.float32, scales


def check_gated(out: torch.Tensor, x: torch.Tensor, out_scales: torch.Tensor | None) -> None:
    assert x.dim() == 2, x.shape
    assert x.is_contiguous(), x.stride()
    assert (x.shape[0], x.shape[1]) == (out.shape[0], 2 * out.shape[1]), (x.shape, out.shape)
    check_out(out, out_scales)


def check_table(table: torch.Tensor, positions: torch.Tensor, num_tokens: int, head_dim: int) -> None:
    assert table.dim() == 2, table.shape
    assert table.dtype == torch.float32, table.dtype
    assert table.is_contiguous(), table.stride()
    assert table.shape[1] % 2 == 0, table.shape
    assert table.shape[1] <= head_dim, (table.shape, head_dim)
    assert positions.shape == (num_tokens,), (positions.shape, num_tokens)
    assert is_index(positions), positions.dtype


def check_rows(rows: DeviceRows) -> None:
    assert rows.positions.dtype == rows.block_table.dtype == torch.int32, rows.positions.dtype
    assert is_index(rows.last_tokens), rows.last_tokens.dtype
    assert len(rows.last_tokens) == len(rows.positions) == len(rows.block_table)
    assert rows.block_table.is_contiguous(), rows.block_table.stride()


def check_kv(kv: torch.Tensor, kv_scales: torch.Tensor | None = None) -> None:
    """Checks the KV of a layer; 8-bit KV comes with scales, other KV without."""
    assert kv.dim() == 5, kv.shape
    assert kv.shape[1] == 2, kv.shape
    assert kv.is_contiguous(), kv.stride()
    assert kv.shape[4] in SUPPORTED_HEAD_DIMS, kv.shape
    check_scales(kv, kv_scales)


def check_attention(
    out: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, kv_scales: torch.Tensor | None = None
) -> None:
    check_kv(kv, kv_scales)
    assert out.shape == query.shape, (out.shape, query.shape)
    assert query.shape[0] == batch.starts[-1], (query.shape, batch.starts)
    assert query.shape[1] % kv.shape[2] == 0, (query.shape, kv.shape)
    assert query.shape[2] == kv.shape[4], (query.shape, kv.shape)
    assert query.dtype == out.dtype, (query.dtype, out.dtype)
    wider = query.dtype == torch.float32 and query.device.type == "cpu"
    assert query.dtype == kv.dtype or wider or kv_scales is not None, (query.dtype, kv.dtype)
    assert query.dtype in SUPPORTED_DTYPES, query.dtype
    assert query.stride(2) == 1, query.stride()
    assert out.stride(2) == 1, out.stride()
    assert batch.block_size == kv.shape[3], (batch.block_size, kv.shape)


def check_heads(query: torch.Tensor, sinks: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    if sinks is not None:
        assert sinks.shape == query.shape[1:2], (sinks.shape, query.shape)
        assert sinks.is_contiguous(), sinks.stride()
    if lse is not None:
        assert lse.shape == query.shape[:2] and lse.is_contiguous(), (lse.shape, query.shape)
        assert lse.dtype == torch.float32, lse.dtype


def check_logits(logits: torch.Tensor, workspace: Workspace | None) -> None:
    assert logits.dim() == 2, logits.shape
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    if workspace is not None:
        cut = workspace.geometry
        assert len(workspace.bounds) >= len(logits), logits.shape
        assert cut.segments * cut.segment_size >= logits.shape[1], (cut, logits.shape)


def check_edits(edits: EditTensors, rows: int, vocab: int) -> None:
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
