"""docs/observability.md lists every span and event with its parent and kind, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from accounting.values import timelines
from gateway.routing.placement import Placement
from gateway.telemetry import spans
from gateway.telemetry.record import LeaseMark, RequestRecord
from gateway.telemetry.spans import PlannedSpan
from workers.protocol.messages import TimelineEvent

PAGE = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
ROOT = "POST /v1/chat/completions"
MS = 1_000_000


def rows(title: str) -> list[list[str]]:
    """The cells of a section's first table, without its head."""
    section = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table[2:]]


def whole() -> RequestRecord:
    """A request to which everything happens that can happen to one."""
    record = RequestRecord("req_1", "POST", route="/v1/chat/completions", status=200, model="llama")
    marks = [
        "accepted",
        *spans.SERVER_EVENTS,
        "admitted",
        "routed",
        "dispatched",
        "moved",
        *spans.CUTS,
        "finished",
        "settled",
    ]
    record.marks = [(name, number * MS) for number, name in enumerate([*marks, "last_byte"])]
    record.routed = Placement("worker-0", "only", 0, 0, 0.0)
    record.leases = [LeaseMark(record.started_mono_ns, 128, "granted")]
    record.worker_timeline = tuple(
        TimelineEvent(name, number * 100, number, 7)
        for number, name in enumerate(
            (
                *("queued", "compiling", "compiled", "fetching", "fetched", "matched", "restored", "chunk"),
                *("first_token", "thinned", "parked", "unparked", "preempted", "swapped_out", "resumed", "swapped_in"),
                *("chunk", "finished"),
            )
        )
    )
    return record


def made() -> list[tuple[PlannedSpan, str]]:
    """Every span with its parent's name."""
    record = whole()
    root = spans.plan(record)
    root.children.append(spans.ship(record, record.started_mono_ns + 10**9))
    found, left = [], [(root, "none")]
    while left:
        span, above = left.pop()
        found.append((span, above))
        left += [(child, span.name) for child in span.children]
    return found


def test_the_table_of_spans_is_what_is_made() -> None:
    short = {ROOT: "server", "none": "none", "chat llama": "`chat`"}
    expected = {(f"`{span.name}`".replace("llama", "{model}"), span.kind, short[above]) for span, above in made()}
    assert {tuple(row[:3]) for row in rows("Spans of a request")} == expected


def test_the_table_of_events_is_what_is_made() -> None:
    short = {ROOT: "server", "chat llama": "`chat`"}
    expected = {(name, short.get(span.name, f"`{span.name}`")) for span, _ in made() for name, _, _ in span.events}
    listed = {(name, row[1]) for row in rows("Events") for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == expected


def test_every_event_of_a_worker_can_be_packed_by_its_number() -> None:
    events = [timelines.entry(event.name, event.offset_us) for event in whole().worker_timeline]
    assert '"' not in timelines.pack([], events)


def test_every_mark_of_a_gateway_can_be_packed_by_its_number() -> None:
    marks = [timelines.entry(name, at // 1000) for name, at in whole().marks]
    assert '"' not in timelines.pack([*marks, timelines.entry("lease", 0)], [])
