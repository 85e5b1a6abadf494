"""Watches the journals of this home for what a person has to look after: journals of gateways that nobody runs although
SQL lacks requests of them, and segments that were set aside because they are damaged.

It reads only. A slot has an owner while its gateway answers on its socket, or while its journal still changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from accounting.database.db import Database
from accounting.requests import request_postings
from gateway.journal.journals import gateway_journals, num_set_aside
from gateway.journal.unshipped import unshipped
from workers.protocol.segments import list_segments

EVERY_S = 15.0
ANSWER_S = 0.25

Extent = tuple[int, ...]
"""SQL's offset in a journal, and the sizes of its segments: whether anything happened to it."""


class JournalWatch:
    def __init__(self, database: Database, registry: CollectorRegistry, journals_dir: Path, run_dir: Path) -> None:
        """`run_dir` has the sockets of the gateways that run."""
        self._database = database
        self._journals_dir = journals_dir
        self._run_dir = run_dir
        self._extents: dict[int, Extent] = {}
        """The extents of journals without an answering gateway, as they were at the last look."""
        self._unreplayed: dict[int, bool] = {}
        """Whether SQL lacks requests of a journal, by journals that have not changed since."""
        self._num_unreplayed = Gauge(
            "headgate_journals_unreplayed",
            "Journals of this home that no gateway owns and of which SQL does not have all requests.",
            registry=registry,
        )
        self._num_set_aside = Gauge(
            "headgate_journal_quarantined_segments",
            "Damaged segments of journals of this home that were set aside.",
            registry=registry,
        )

    async def look(self) -> None:
        """Looks at all journals. A journal is found unreplayed at the second look, because its owner may just be
        starting. Raises OSError, and what SQL raises.
        """
        journals = await asyncio.to_thread(gateway_journals, self._journals_dir)
        for slot, directory in journals.items():
            if await _answers(self._run_dir / f"gateway-{slot}.sock"):
                self._extents.pop(slot, None)
                self._unreplayed.pop(slot, None)
            else:
                await self._look_at(slot, directory)
        self._num_unreplayed.set(sum(self._unreplayed.values()))
        self._num_set_aside.set(await asyncio.to_thread(num_set_aside, self._journals_dir))

    async def _look_at(self, slot: int, directory: Path) -> None:
        async with self._database.read() as conn:
            offset = await request_postings.journal_offset(conn, slot) or 0
        extent = await asyncio.to_thread(_extent, directory, offset)
        if extent != self._extents.get(slot):
            self._extents[slot] = extent
            self._unreplayed.pop(slot, None)
        elif slot not in self._unreplayed:
            left = await asyncio.to_thread(unshipped, directory, offset)
            self._unreplayed[slot] = bool(left.requests)


def _extent(directory: Path, offset: int) -> Extent:
    return (offset, *(segment.path.stat().st_size for segment in list_segments(directory)))


async def _answers(socket: Path) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:  # nobody listens; TimeoutError is one of them
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
