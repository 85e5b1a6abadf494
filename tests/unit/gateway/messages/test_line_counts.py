"""The numbers of lines of input files: each is counted once, one at a time for each tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.messages import line_counts
from gateway.messages.line_counts import LineCounts


class Files:
    """Counts one line more each time that it is asked, and knows how many counts run."""

    def __init__(self) -> None:
        self.num_asked = self.num_running = self.most_running = 0

    def count(self) -> Callable[[], Awaitable[int]]:
        async def count() -> int:
            self.num_asked += 1
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            await asyncio.sleep(0)
            self.num_running -= 1
            return self.num_asked

        return count


async def test_a_file_is_counted_once_however_many_ask() -> None:
    counts, files = LineCounts(), Files()
    asked = [counts.of("a", "file-1", files.count()) for _ in range(5)]
    assert await asyncio.gather(*asked) == [1] * 5
    assert await counts.of("a", "file-1", files.count()) == files.num_asked == 1


async def test_a_tenant_has_one_file_counted_at_a_time_and_others_do_not_wait_for_it() -> None:
    counts, files = LineCounts(), Files()
    await asyncio.gather(*(counts.of("a", f"file-{number}", files.count()) for number in range(5)))
    assert (files.num_asked, files.most_running) == (5, 1)
    await asyncio.gather(*(counts.of(tenant, f"of {tenant}", files.count()) for tenant in "bc"))
    assert files.most_running == 2


async def test_a_count_that_fails_is_made_again_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_counts, "MAX_KNOWN", 1)
    counts, files = LineCounts(), Files()

    async def broken() -> int:
        raise OSError("the disk is away")

    with pytest.raises(OSError, match="away"):
        await counts.of("a", "file-1", broken)
    assert [await counts.of("a", name, files.count()) for name in ("file-1", "file-2", "file-2", "file-1")] == [
        1,
        2,
        2,
        3,
    ]
