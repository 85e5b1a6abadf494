from __future__ import annotations

import pytest

from cache.tree.namespaces import UNBOUNDED, PathEntry, Segment, segments


def test_each_end_is_rounded_down_to_whole_blocks() -> None:
    path = (PathEntry(b"public", 7), PathEntry(b"tenant", 8), PathEntry(b"user", -1))
    assert segments(path, 4) == (Segment(b"public", 1), Segment(b"tenant", 2), Segment(b"user", UNBOUNDED))


@pytest.mark.parametrize(
    "path",
    [
        (),
        (PathEntry(b"a", 4),),
        (PathEntry(b"a", -1), PathEntry(b"b", -1)),
        (PathEntry(b"a", 8), PathEntry(b"b", 4), PathEntry(b"c", -1)),
        (PathEntry(b"a", 4), PathEntry(b"b", 8), PathEntry(b"a", -1)),
    ],
    ids=["empty", "never open", "open before the end", "ends fall", "steps back"],
)
def test_a_path_that_breaks_the_order_is_refused(path: tuple[PathEntry, ...]) -> None:
    with pytest.raises(ValueError, match="namespace path"):
        segments(path, 4)
