"""Copies of blocks that a plan names in order, made in parts whose copies a device makes at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.step.pipeline import num_at_once

BLOCKS = st.integers(0, 5)


@given(st.lists(st.tuples(BLOCKS, BLOCKS).filter(lambda pair: pair[0] != pair[1]), max_size=12))
def test_copies_in_parts_give_what_copies_one_by_one_give(copies):
    one_by_one, in_parts = list("abcdef"), list("abcdef")
    for source, target in copies:
        one_by_one[target] = one_by_one[source]
    while copies:
        number = num_at_once(copies)
        part, copies = copies[:number], copies[number:]
        targets = {target for _, target in part}
        assert len(targets) == len(part)
        assert targets.isdisjoint(source for source, _ in part)
        assert not copies or copies[0][1] in {b for pair in part for b in pair} or copies[0][0] in targets, "cut early"
        for source, target in part:
            in_parts[target] = in_parts[source]
    assert in_parts == one_by_one
