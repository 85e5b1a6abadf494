"""Delivery of engine records to SQL through a connected gateway. The module is pure and sends nothing itself.

An acknowledgement covers every record up to its number. So a frame has all unacknowledged records up to its last one,
and the next frame is sent when it is answered: whatever a gateway drops, it has what it acknowledges. When the link is
lost or stays silent, all unacknowledged records are sent again by another link. Duplicates are harmless: SQL keeps one
record per (request_id, attempt).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from workers.protocol.counts import MAX_RECORDS_IN_FRAME, EngineRecord

RETRY_S = 5.0


class Shipper:
    def __init__(self, records: Iterable[EngineRecord] = ()) -> None:
        self._records = {record.seq: record for record in records}
        self._link: int | None = None
        self._sent = 0
        self._waiting_since = 0.0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: EngineRecord) -> None:
        self._records[record.seq] = record

    def ack(self, link: int, seq: int, now: float) -> int:
        """Handles an acknowledgement. Returns the last number that may be forgotten, or 0 if the answer is not from the
        link that was asked."""
        if link != self._link or seq > self._sent:
            return 0
        for acked in [other for other in self._records if other <= seq]:
            del self._records[acked]
        self._waiting_since = now
        return seq

    def next(self, links: list[int], now: float) -> tuple[int, list[EngineRecord]] | None:
        """Returns the link and the records to send now, or None."""
        if not self._records or not links:
            return None
        is_silent = self._unanswered and now - self._waiting_since >= RETRY_S
        if self._link not in links or is_silent:
            self._link = _after(links, self._link)
        elif self._unanswered:
            return None
        batch = list(islice(self._records.values(), MAX_RECORDS_IN_FRAME))
        self._waiting_since = now
        self._sent = batch[-1].seq
        assert self._link is not None
        return self._link, batch

    @property
    def _unanswered(self) -> bool:
        return any(seq <= self._sent for seq in self._records)


def _after(links: list[int], link: int | None) -> int:
    """Returns another link if there is one."""
    later = [other for other in links if link is None or other > link]
    return min(later or links)
