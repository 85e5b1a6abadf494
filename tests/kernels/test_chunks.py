"""Decode attention in chunks: against its definition over chunk ends, shared chunks, and rows beside others."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch
from kernels.arguments.batch import PagedBatch
from kernels.reference import chunks
from kernels.reference.chunks import CHUNK, ChunkPlan

OPS = dispatch.choose(torch.device("cpu"))
BLOCK, KV_HEADS, HEAD_DIM = 16, 2, 16


def layer(num_blocks: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_blocks)
    shape = (num_blocks, 2, KV_HEADS, BLOCK, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype)


def batch_of(tables: list[list[int]], lens: list[int]) -> PagedBatch:
    ones = [1] * len(lens)
    return PagedBatch(ones, [n - 1 for n in lens], [torch.tensor(t) for t in tables], BLOCK)


def attended(query: torch.Tensor, kv: torch.Tensor, tables: list[list[int]], lens: list[int]) -> torch.Tensor:
    out = torch.full_like(query, float("nan"))
    OPS.attention_decode(out, query, kv, batch_of(tables, lens), 0.25)
    return out


def defined(query: torch.Tensor, kv: torch.Tensor, tables: list[list[int]], lens: list[int]) -> torch.Tensor:
    rows = []
    for asking, table, length in zip(query, tables, lens, strict=True):
        keys, values = kv[table].double().permute(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, HEAD_DIM)
        keys, values = keys[:, :length], values[:, :length]
        scores = asking.double().view(KV_HEADS, -1, HEAD_DIM) @ keys.transpose(1, 2) * 0.25
        rows.append((scores.softmax(-1) @ values).view(-1, HEAD_DIM))
    return torch.stack(rows)


def blocks_of(length: int) -> int:
    return -(-length // BLOCK)


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_place_of_a_last_token_equals_the_definition(groups: int, dtype: torch.dtype) -> None:
    lens = [1, 15, 16, 17, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 130]
    kv = layer(1 + sum(map(blocks_of, lens)), dtype)
    tables, used = [], 1
    for length in lens:
        tables.append(list(range(used, used := used + blocks_of(length)))[::-1])
        last, filled = tables[-1][-1], length % BLOCK or BLOCK
        kv[last, :, :, filled:] = float("nan")  # never written
    query = torch.randn((len(lens), KV_HEADS * groups, HEAD_DIM))
    found = attended(query, kv, tables, lens)
    torch.testing.assert_close(found.double(), defined(query, kv, tables, lens), atol=1e-5, rtol=1e-5)


def test_a_chunk_that_rows_share_is_read_once_and_each_row_gets_its_own_answer() -> None:
    lens = [CHUNK + 40, CHUNK + 200, 2 * CHUNK + 3, 30]
    shared = list(range(1, 1 + CHUNK // BLOCK))
    used, tables = 1 + len(shared), []
    for length in lens:
        own = blocks_of(length) - (len(shared) if length > CHUNK else 0)
        tables.append((shared if length > CHUNK else []) + list(range(used, used := used + own)))
    kv = layer(used)
    plan = ChunkPlan.of(batch_of(tables, lens), KV_HEADS, HEAD_DIM)
    whole = [part for part in plan.parts if part.hidden is None]
    assert [(part.num_chunks, len(part.readers)) for part in whole] == [(1, 3), (1, 1)]
    query = torch.randn((4, 6, HEAD_DIM))
    together = attended(query, kv, tables, lens)
    expected = defined(query, kv, tables, lens)
    torch.testing.assert_close(together.double(), expected, atol=1e-5, rtol=1e-5)
    for row in range(4):
        alone = attended(query[row : row + 1], kv, tables[row : row + 1], lens[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=1e-6)


def test_large_parts_are_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_ELEMENTS", 2 * KV_HEADS * HEAD_DIM * CHUNK)
    lens = [CHUNK + 1 + row for row in range(5)]
    tables = [list(range(1 + 40 * row, 1 + 40 * row + blocks_of(lens[row]))) for row in range(5)]
    kv, query = layer(201), torch.randn((5, 4, HEAD_DIM))
    plan = ChunkPlan.of(batch_of(tables, lens), KV_HEADS, HEAD_DIM)
    assert sorted(part.num_chunks for part in plan.parts if part.hidden is None) == [1, 2, 2]
    found = attended(query, kv, tables, lens)
    torch.testing.assert_close(found.double(), defined(query, kv, tables, lens), atol=1e-5, rtol=1e-5)


def test_another_order_of_the_blocks_is_another_chunk() -> None:
    first = list(range(1, 1 + CHUNK // BLOCK))
    tables = [[*first, 90], [*first[::-1], 91]]
    plan = ChunkPlan.of(batch_of(tables, [CHUNK + 1] * 2), KV_HEADS, HEAD_DIM)
    assert plan.parts[0].num_chunks == 2


def test_every_tensor_of_a_part_goes_to_another_device():
    plan = ChunkPlan.of(batch_of([[1, *range(2, 40)], [41]], [600, 3]), KV_HEADS, HEAD_DIM)
    meta = torch.device("meta")
    for part in plan.parts:
        there = part.to(meta)
        for name, value in vars(part).items():
            moved = getattr(there, name)
            assert moved.device == meta if isinstance(value, torch.Tensor) else moved == value, name
