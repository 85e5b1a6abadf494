"""The past of a response, as its items are listed."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.responses import past


@pytest.mark.parametrize(("newest_first", "expected"), [(False, ["a", "b", "c"]), (True, ["c", "b", "a"])])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_list_of_items_ends_where_one_occurs_twice(newest_first: bool, expected: list[str], most: int) -> None:
    """An item that was named by id occurs twice; a client that paged began again behind the first one, for ever."""
    items: list[dict[str, Any]] = [{"id": name} for name in ("a", "b", "a", "c", "b")]
    found: list[str] = []
    after = None
    for _ in range(10):
        page = past.page(items, newest_first=newest_first, after=after, most=most)
        found += [item["id"] for item in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert found == expected
