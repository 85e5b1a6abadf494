"""Which decode rows share a prefix that is worth reading once."""

from __future__ import annotations

import random

from workers.engine.device.shared_rows import shared_groups
from workers.engine.values.plan import Row

BLOCK = 4


def row(*blocks: int, num_tokens: int | None = None) -> Row:
    """A decode row over these blocks, the last of them partly filled."""
    return Row([1], len(blocks) * BLOCK - 2 if num_tokens is None else num_tokens, list(blocks))


def pays(shared_len: int, num_rows: int) -> bool:
    return shared_len >= 2 * BLOCK and num_rows >= 3


def test_rows_of_one_prefix_are_a_group_and_the_others_are_not():
    rows = [row(1, 2, 3, 10), row(7, 8, 9), row(1, 2, 3, 11), row(1, 2, 3, 12), row(1, 5, 6, 13)]
    assert shared_groups(rows, BLOCK, pays) == [([0, 2, 3], 3)]


def test_two_prefixes_are_two_groups():
    one = [row(1, 2, 10 + n) for n in range(3)]
    two = [row(5, 6, 7, 20 + n) for n in range(4)]
    groups = shared_groups([*two, *one], BLOCK, pays)
    assert sorted(groups) == [([0, 1, 2, 3], 3), ([4, 5, 6], 2)]


def test_a_block_that_a_row_still_writes_is_not_shared():
    rows = [row(1, 2, 3, num_tokens=2 * BLOCK + 1) for _ in range(3)]
    assert shared_groups(rows, BLOCK, pays) == [([0, 1, 2], 2)]


def test_what_does_not_pay_is_no_group():
    assert shared_groups([row(1, 2, 3)] * 2, BLOCK, pays) == []
    assert shared_groups([row(1, 10 + n) for n in range(9)], BLOCK, pays) == []
    assert shared_groups([], BLOCK, pays) == []


def test_the_gate_of_the_kernel_decides_by_default():
    blocks = list(range(1, 1 + 512 // BLOCK))
    eight = [row(*blocks, 1000 + n) for n in range(8)]
    assert shared_groups(eight, BLOCK) == [(list(range(8)), 512 // BLOCK)]
    assert shared_groups(eight[:7], BLOCK) == []


def test_groups_are_true_of_random_tables():
    draw = random.Random(5)
    for _ in range(200):
        roots = [[draw.randrange(1, 9) for _ in range(draw.randrange(6))] for _ in range(3)]
        rows = [
            row(*draw.choice(roots), *(draw.randrange(1, 9) for _ in range(draw.randrange(4))), 99)
            for _ in range(draw.randrange(12))
        ]
        seen: list[int] = []
        for members, number in shared_groups(rows, BLOCK, pays):
            assert pays(number * BLOCK, len(members))
            starts = {tuple(rows[m].block_table[:number]) for m in members}
            assert len(starts) == 1
            assert all(number * BLOCK <= rows[m].start for m in members)
            seen += members
        assert len(seen) == len(set(seen))
