"""The one record of an HTTP request: its facts and a timeline, filled during the request, read once by the observers at its end.

Logs, metrics, the request log and spans are all made from it (architecture.md decision 12). It holds no text of a
prompt or an output, no header value and no key.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from accounting.values.types import Principal, RequestFacts, Usage
from workers.protocol.messages import CacheReport, TimelineEvent

Mark = Literal[
    "accepted",
    "authenticated",
    "tokenized",
    "admitted",
    "dispatched",
    "resumed",
    "first_byte",
    "finished",
    "last_byte",
    "settled",
]


@dataclass(slots=True)
class RequestRecord:
    request_id: str
    method: str
    started_ns: int = field(default_factory=time.time_ns)
    """The wall clock at the acceptance; all marks are offsets from it on the monotonic clock."""
    started_mono_ns: int = field(default_factory=time.monotonic_ns)
    route: str = "_unmatched"
    """The route's template, never the path."""
    status: int = 0
    outcome: str = ""
    """One of `ok`, `client_error`, `refused`, `server_error`, `client_gone`."""
    principal: Principal | None = None
    client_request_id: str = ""
    peer: str = ""
    traceparent: str = ""
    """The client's own header: tracing links or continues it; it is never trusted here."""
    model: str = ""
    tier: str = ""
    stream: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    """Request parameters that telemetry may show: numbers and flags only."""
    facts: RequestFacts | None = None
    """The request as the journal and the ledger know it, over all its prompts. It is there once they are counted; a
    request that was refused before has `principal`, `route`, and perhaps `model` and `tier`.
    """
    num_retries: int = 0
    """The number of earlier tries of which the client's SDK tells."""
    usage: Usage = field(default_factory=Usage)
    charge_micro_units: int = 0
    currency: str = ""
    finish_reasons: tuple[str, ...] = ()
    error_code: str = ""
    disconnect_phase: str = ""
    worker: str = ""
    attempt: int = 0
    worker_timeline: tuple[TimelineEvent, ...] = ()
    cache: CacheReport = field(default_factory=CacheReport)
    """Why no more of the prompt was cached; positions of tokens only."""
    outgoing_traceparent: str = ""
    """The traceparent that was sent to the worker."""
    is_waiting: bool = False
    """The stream was opened before its first text, so that no proxy takes the connection for dead."""
    settling: asyncio.Task[Any] | None = None
    """A settlement that outlives the request; the observers wait for it."""
    marks: list[tuple[Mark, int]] = field(default_factory=list)
    """Pairs (name, nanoseconds since acceptance)."""

    def mark(self, name: Mark) -> None:
        self.marks.append((name, time.monotonic_ns() - self.started_mono_ns))

    def offset_ms(self, name: Mark) -> float | None:
        """Returns the milliseconds from acceptance to the first mark of that name."""
        return next((ns / 1e6 for mark, ns in self.marks if mark == name), None)

    @property
    def duration_ms(self) -> float:
        return (time.monotonic_ns() - self.started_mono_ns) / 1e6
