"""The counts of an engine, independent of every gateway: tokens of attempts, and KV that is kept by the hour.

Records of attempts come from the worker's journal and are acknowledged. Sums of hours are sent again and again.
"""

from __future__ import annotations

from workers.protocol.base import Frame


class PromptCounts(Frame, frozen=True):
    """The disjoint parts of the prompt, fixed when the prefill ends."""

    cache_read: int = 0
    cache_write: int = 0
    uncached: int = 0


class TokenUsage(Frame, frozen=True):
    """The token counts of the engine for one attempt. The first four are disjoint and billable: prompt = cache_read +
    cache_write + uncached."""

    cache_read: int = 0
    cache_write: int = 0
    """Tokens that this request computed and inserted as prefix nodes."""
    uncached: int = 0
    """Tokens that were computed and not inserted."""
    output: int = 0
    speculated: int = 0
    """Rejected draft tokens, which are never billed."""
    recomputed: int = 0
    """Tokens that were computed again after preemption or resumption; they are never billed."""

    @property
    def prompt(self) -> int:
        return self.cache_read + self.cache_write + self.uncached


class EngineRecord(Frame, frozen=True):
    """One finished attempt in the engine's own journal: the independent count for metering."""

    seq: int
    request_id: str
    attempt: int
    tenant: str
    root: str
    usage: TokenUsage
    reason: str = ""


MAX_RECORDS_IN_FRAME = 500


class EngineRecords(Frame, frozen=True, tag="records"):
    """Records that are sent through any connected gateway. The worker keeps them until `EngineAck`."""

    worker: str
    records: tuple[EngineRecord, ...]


class EngineAck(Frame, frozen=True, tag="ack"):
    worker: str
    seq: int
    """The last record that is committed in SQL."""


class TenantHour(Frame, frozen=True, array_like=True):
    """Byte-milliseconds of one hour so far: `pinned` counts KV that pins kept in the tree, `cache` all other KV
    there."""

    hour: int
    """The first Unix second of the hour."""
    tenant: str
    cache: int
    pinned: int


class ResidencyReport(Frame, frozen=True, tag="residency"):
    """Sums of this process for this hour and the one before, which only rise. It is sent each minute and not
    acknowledged."""

    process: str
    model: str
    hours: tuple[TenantHour, ...]
