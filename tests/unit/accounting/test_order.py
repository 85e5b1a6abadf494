"""Lines → chunks: neighbours share prefixes, nothing is lost, and line numbers survive packing."""

from __future__ import annotations

import itertools
import random

from accounting.batches import order
from accounting.batches.order import PackedLine, Placed, chunks, pack, prefix_bytes, sort_key, unpack


def placed(no: int, text: str, tokens: int = 1) -> Placed:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return Placed(no, no * 10, 9, sort_key(prefix_bytes(body)), tokens)


def test_the_canonical_prefix_ignores_spacing_and_the_order_of_keys():
    one = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1}
    two = {"messages": [{"content": "x", "role": "user"}], "model": "m", "seed": 5}
    assert prefix_bytes(one) == prefix_bytes(two)


def test_lines_with_a_common_system_prompt_end_up_side_by_side():
    systems = ["a" * 3000, "b" * 3000, "a" * 2999 + "c"]
    lines = [placed(i, systems[i % 3] + str(i)) for i in range(30)]
    random.Random(1).shuffle(lines)
    (chunk,) = chunks(lines, 64)
    groups = [line.line_no % 3 for line in chunk]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == 2


def test_the_key_of_a_long_prefix_stays_short():
    assert len(sort_key(b"x" * 10_000_000)) < 3072
    assert sort_key(b"x" * 2000 + b"a") != sort_key(b"x" * 2000 + b"b")


def test_chunks_hold_each_line_once_within_both_bounds(monkeypatch):
    monkeypatch.setattr(order, "CHUNK_TOKENS", 100)
    lines = [placed(i, f"{i}", tokens=30) for i in range(20)] + [placed(99, "z", tokens=5000)]
    made = list(chunks(lines, 8))
    assert sorted(line.line_no for chunk in made for line in chunk) == [*range(20), 99]
    assert all(len(chunk) <= 3 for chunk in made)
    assert [line.line_no for line in made[-1]] == [99], "a line of any size runs, alone"
    assert [len(chunk) for chunk in chunks([placed(i, f"{i}") for i in range(20)], 8)] == [8, 8, 4]
    monkeypatch.setattr(order, "CHUNK_BYTES", 30)
    by_bytes = list(chunks([placed(i, f"{i}") for i in range(8)], 8))
    assert [len(chunk) for chunk in by_bytes] == [3, 3, 2], "a runner holds no more bytes than that"


def test_packing_keeps_number_offset_and_length():
    assert unpack(pack([placed(7, "x")])) == [PackedLine(7, 70, 9)]
    assert list(chunks([], 8)) == []
