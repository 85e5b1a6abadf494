"""Row B8: the buffers of a decode step have room for the parts of shared prefixes beside those of what is a row's own."""

from __future__ import annotations

import pytest
import torch

from kernels.arguments.splits import most_shared_splits, most_splits
from kernels.triton.attention.attention_shared import space_of
from workers.engine.device.graph_buffers import StaticBatch
from workers.engine.device.shared_rows import shared_groups
from workers.engine.values.plan import Row, SampleSpec
from workers.protocol.messages import SamplingParams

CPU = torch.device("cpu")
BLOCK, HEADS, HEAD_DIM, BUCKET = 16, 4, 8, 16
DRAW = SampleSpec(SamplingParams(seed=0), 0, 1, (), ())


def decoding(index: int, shared: int, own: int) -> Row:
    """A row behind `shared` blocks that others have too, and `own` of its own."""
    mine = range(10_000 * (index + 1), 10_000 * (index + 1) + own + 1)
    table = [*range(1, 1 + shared), *mine]
    return Row([7], (shared + own) * BLOCK, table, (DRAW,), row_id=index)


@pytest.mark.parametrize("max_len", [4097 + BLOCK, 8192, 40_000, 131_072])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_rows_that_share_a_prefix_fit_beside_a_row_as_long_as_it_may_be(max_len: int, share: float) -> None:
    """12 rows that read their prefix together, 4 alone."""
    blocks = (max_len - 1) // BLOCK
    prefix = int(share * blocks)
    rows = [decoding(index, prefix, blocks - prefix) for index in range(12)]
    rows += [decoding(index, 0, blocks) for index in range(12, BUCKET)]
    static = StaticBatch(BUCKET, -(-max_len // BLOCK), BLOCK, 11, CPU, (HEADS, HEAD_DIM), shared_attention=True)
    groups = shared_groups(rows, BLOCK)
    assert [len(members) for members, _ in groups] == [12]
    context = static.shared_context(BUCKET, rows, groups)
    assert context.decode is not None and context.shared is not None
    query = torch.empty((BUCKET, HEADS, HEAD_DIM))
    space = space_of(context.decode, query, context.shared)
    parts = most_splits(context.shared.max_own_len) + context.shared.num_splits
    assert space.holds(BUCKET, HEADS, HEAD_DIM, parts)
    assert parts <= most_splits(max_len) + most_shared_splits(max_len)


def test_without_shared_attention_there_is_no_room_for_it() -> None:
    """It would be a third of the memory more."""
    static = [
        StaticBatch(BUCKET, 256, BLOCK, 11, CPU, (HEADS, HEAD_DIM), shared_attention=shares) for shares in (False, True)
    ]
    spaces = [each.decode_batch([1]).workspace for each in static]
    assert [len(space.sums) for space in spaces if space] == [BUCKET * HEADS * HEAD_DIM * parts for parts in (16, 24)]
