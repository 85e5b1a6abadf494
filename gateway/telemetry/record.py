"""The one record of an HTTP request: its facts and a timeline, filled during the request, read once by the observers at its end.

Logs, metrics, the request log and spans are all made from it (architecture.md decision 12). It holds no text of a
prompt or an output, no header value and no key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from accounting.values.types import Principal, RequestFacts, Usage
from workers.protocol.counts import TokenUsage
from workers.protocol.messages import CacheReport, TimelineEvent

Cut = Literal["client_gone", "worker_lost", "lease_lost", "drained", "failed"]
"""The cause that ended a request before its worker did, or instead of it."""
Mark = (
    Literal[
        "accepted",
        "authenticated",
        "grammar",
        "tokenized",
        "admitted",
        "routed",
        "dispatched",
        "first_byte",
        "finished",
        "last_byte",
        "settled",
        "moved",
    ]
    | Cut
)


LeaseResult = Literal["granted", "waits", "stopped"]


class LeaseMark(NamedTuple):
    """An extension of the lease."""

    at_mono_ns: int
    bound: int
    """Output tokens that may be spent from then on, over all choices."""
    result: LeaseResult


class RoutedTo(Protocol):
    """The router's choice of a worker (`gateway/routing/placement.py`), as telemetry shows it."""

    @property
    def reason(self) -> str: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_elsewhere(self) -> int: ...
    @property
    def ttft_s(self) -> float: ...


class Asked(NamedTuple):
    """The client's wishes in numbers and flags: nothing of its text, and nothing that is large."""

    num_prompts: int
    num_choices: int
    max_tokens: int
    """The bound of each choice."""
    temperature: float
    top_p: float
    top_k: int
    seed: int
    """An unsigned integer of 64 bits."""
    frequency_penalty: float
    presence_penalty: float
    has_grammar: bool


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
    principal: Principal | None = None
    client_request_id: str = ""
    peer: str = ""
    is_page_read: bool = False
    """Whether a page of the console asks for what it shows. Such a request has no row in the request log: its key's
    owner looks at the log and has sent nothing.
    """
    background: Literal["", "created", "run"] = ""
    """Whether the request has created a response in the background, or is one run of it. No client waits for its text."""
    traceparent: str = ""
    """The client's own header: tracing links or continues it; it is never trusted here."""
    model: str = ""
    tier: str = ""
    stream: bool = False
    asked: Asked | None = None
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
    refused_by: str = ""
    """Level and dimension of the limit that refused the request, such as `tenant/requests`."""
    replayed: str = ""
    """The request whose stored answer this one was given, under the same idempotency key."""
    disconnect_phase: str = ""
    worker: str = ""
    """The worker of the prompt that `worker_timeline` tells of."""
    routed: RoutedTo | None = None
    worker_timeline: tuple[TimelineEvent, ...] = ()
    """The timeline of the prompt that failed, or else of the first one."""
    worker_usage: TokenUsage | None = None
    num_received: int = 0
    """Output tokens of that prompt that the gateway received."""
    lease_bound: int = 0
    """Output tokens of the first lease."""
    leases: Sequence[LeaseMark] = ()
    cache: CacheReport = field(default_factory=CacheReport)
    """Why no more of the prompt was cached; positions of tokens only."""
    outgoing_traceparent: str = ""
    """The request's own trace and SERVER span, for whoever works because of it."""
    worker_traceparent: str = ""
    """The same trace and the span of the worker's work, which the worker is sent."""
    is_waiting: bool = False
    """The stream was opened before its first text, so that no proxy takes the connection for dead."""
    settling: asyncio.Future[Any] | None = None
    """A settlement that outlives the request; the observers wait for it."""
    marks: list[tuple[Mark, int]] = field(default_factory=list)
    """Pairs (name, nanoseconds since acceptance)."""

    def mark(self, name: Mark) -> None:
        self.marks.append((name, time.monotonic_ns() - self.started_mono_ns))

    def offset_ms(self, name: Mark) -> float | None:
        """Returns the milliseconds from acceptance to the first mark of that name."""
        for mark, ns in self.marks:
            if mark == name:
                return ns / 1e6
        return None

    @property
    def log_ids(self) -> dict[str, str]:
        """Returns the ids by which lines of the log name the request: its own, and those that are known by now."""
        ids = {"request_id": self.request_id}
        if self.principal is not None:
            ids["tenant"] = self.principal.tenant_id
        if self.outgoing_traceparent:
            _, ids["trace_id"], ids["span_id"], _ = self.outgoing_traceparent.split("-")
        return ids

    @property
    def is_answer(self) -> bool:
        """Whether the route's own answer was asked for: a GET on such a route opens a WebSocket, whose messages are
        requests of their own.
        """
        return self.method == "POST"

    @property
    def settled_mono_ns(self) -> int | None:
        """The monotonic clock at the durable ending; None if there was none."""
        return next((self.started_mono_ns + ns for mark, ns in self.marks if mark == "settled"), None)

    @property
    def outcome(self) -> str:
        """One of `ok`, `client_error`, `refused`, `server_error`, `client_gone`. A stream that failed after its head
        has status 200 and an error code.
        """
        if self.disconnect_phase or self.status == 499:
            return "client_gone"
        if self.status >= 500 or (self.status == 200 and self.error_code):
            return "server_error"
        if self.status == 429:
            return "refused"
        return "client_error" if self.status >= 400 else "ok"

    @property
    def duration_ms(self) -> float:
        return (time.monotonic_ns() - self.started_mono_ns) / 1e6
