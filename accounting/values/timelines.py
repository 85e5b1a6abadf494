"""The timeline of one request as the request log keeps it: packed text, at most 4 KiB; events; phases for a waterfall.

All times are microseconds since the gateway accepted the request. The worker's events are offsets on its own clock.
They are placed after the moment at which the request was sent to it, and before the gateway had its end: clocks of two
hosts are never subtracted. The module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

MAX_PACKED_CHARS = 4096

NAMES = (
    "accepted",
    "authenticated",
    "tokenized",
    "admitted",
    "dispatched",
    "lease",
    "resumed",
    "first_byte",
    "finished",
    "last_byte",
    "settled",
    "queued",
    "matched",
    "chunk",
    "first_token",
    "preempted",
    "parked",
    "thinned",
    "restored",
    "compiling",
    "compiled",
    "fetching",
    "fetched",
    "unparked",
    "swapped_out",
    "swapped_in",
    "grammar",
    "routed",
    "client_gone",
    "worker_lost",
    "lease_lost",
    "drained",
    "failed",
    "moved",
)
"""The names that are packed as their place here. A name is only ever added at the end, because old rows stay."""
_CODES = {name: code for code, name in enumerate(NAMES)}

_GATEWAY_PHASES = (
    ("authenticate", "accepted", ("authenticated",)),
    ("tokenize", "authenticated", ("tokenized",)),
    ("admit", "tokenized", ("admitted", "first_byte")),
    ("dispatch", "admitted", ("dispatched", "first_byte")),
    ("lost", "dispatched", ("moved",)),
    ("settle", "finished", ("settled",)),
)
"""Name, the event at its start, and events at its end. The first of these that is there counts: a refusal ends the phase
that decided with the first byte of its answer. What a worker did that was lost, until another one went on, is "lost"."""


_RUNNING = "running"
_FOLLOWING = {
    "queued": "queue",
    "compiling": "grammar",
    "compiled": "queue",
    "fetching": "fetch",
    "fetched": "queue",
    "parked": "parked",
    "preempted": "preempted",
    "finished": "",
} | dict.fromkeys(("matched", "restored", "swapped_in", "chunk", "first_token", "unparked", "resumed"), _RUNNING)
"""Event of the worker → the phase that begins with it. A request that runs is in prefill or decodes."""
_COPIES = {"restored": "restore", "swapped_in": "swap_in"}
"""Event at the end of a copy from the host → the phase that ends with it."""


class Event(msgspec.Struct, frozen=True):
    name: str
    at_us: int
    step: int = -1
    """The worker's step; -1 where there is none."""
    num_tokens: int = 0


class Timeline(msgspec.Struct, frozen=True):
    gateway: tuple[Event, ...] = ()
    worker: tuple[Event, ...] = ()
    """The worker's events, on the gateway's time."""
    num_left_out: int = 0
    """Events that the packed form had no room for."""


class Phase(msgspec.Struct, frozen=True):
    """An interval of the waterfall."""

    name: str
    start_us: int
    end_us: int
    step: int = -1
    num_tokens: int = 0


Entry = list[int | str]
"""An event as it is packed: its name's code, its time, and its step and tokens where it has them."""
_Packed = tuple[list[Entry], list[Entry], int]


def entry(name: str, at_us: int, step: int = -1, num_tokens: int = 0) -> Entry:
    """Returns the packed form of an event."""
    code = _CODES.get(name, name)
    return [code, at_us, step, num_tokens] if step >= 0 or num_tokens else [code, at_us]


def entries(times: Iterable[tuple[str, int]]) -> list[Entry]:
    """Returns the packed forms of events that have a name and nanoseconds alone."""
    return [[_CODES.get(name, name), ns // 1000] for name, ns in times]


def pack(marks: Sequence[Entry], worker: Sequence[Entry]) -> str:
    """Returns the text for the log. `worker` has offsets on the worker's own clock."""
    num_events = len(marks) + len(worker)
    while True:
        num_kept = len(marks) + len(worker)
        text = msgspec.json.encode((marks, worker, num_events - num_kept)).decode()
        if len(text) <= MAX_PACKED_CHARS or not num_kept:
            return text
        marks, worker = _thinned(marks), _thinned(worker)
        if len(marks) + len(worker) == num_kept:
            worker = worker[: len(worker) // 2]
            marks = marks if worker else []


def unpack(text: str) -> Timeline:
    """Returns the timeline of a packed text, with the worker's events on the gateway's time. A text that nobody can
    read is an empty timeline."""
    try:
        marks, events, num_left_out = msgspec.json.decode(text, type=_Packed)
        gateway = tuple(_event(one) for one in marks)
        offsets = [_event(one) for one in events]
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError):
        return Timeline()
    return Timeline(gateway, _placed(gateway, offsets), num_left_out)


def phases(timeline: Timeline) -> list[Phase]:
    """Returns the waterfall in the order of starts: the gateway's intervals, and the worker's between them."""
    at = _first(timeline.gateway)
    found = [
        Phase(name, at[start], end_us)
        for name, start, ends in _GATEWAY_PHASES
        if start in at and at[start] <= (end_us := next((at[end] for end in ends if end in at), -1))
    ]
    found += [phase for phase in worker_phases(timeline.worker) if phase.num_tokens or phase.end_us > phase.start_us]
    ended_us = max((event.at_us for event in timeline.worker), default=at.get("finished", 0))
    if ended_us < at.get("finished", 0):
        # Both ways together: clocks of two hosts are never subtracted, so the way there is drawn here, too.
        found.append(Phase("wire", ended_us, at["finished"]))
    return sorted(found, key=lambda phase: (phase.start_us, phase.end_us))


def worker_phases(events: Sequence[Event]) -> list[Phase]:
    """Returns what the request did in the worker, in the order of time; a phase may have no length. A chunk's event
    comes at the end of the chunk, as does that of a copy from the host; a preemption or a spent lease ends a window of
    decoding."""
    found: list[Phase] = []
    present, since_us, has_token, has_blocks = "", 0, False, True
    for event in events:
        has_token = has_token or event.name == "first_token"
        if event.name in ("preempted", "resumed"):
            has_blocks = event.name == "resumed"
        following = _FOLLOWING.get(event.name)
        if following is None:
            continue
        if event.name == "unparked" and not has_blocks:
            following = "preempted"
        elif following == _RUNNING:
            following = "decode" if has_token else "prefill"
        if event.name == "chunk":
            found.append(Phase("prefill", since_us, event.at_us, event.step, event.num_tokens))
        elif present:
            found.append(Phase(_COPIES.get(event.name, present), since_us, event.at_us))
        present, since_us = following, event.at_us
    return found


def placed_us(gateway: Mapping[str, int], offset_us: int) -> int:
    """Returns the time on the gateway's clock of a worker's event with this offset. `gateway` has the first time of
    each of the gateway's events."""
    start, end = _sent(gateway)
    return min(start + max(0, offset_us), end)


def _placed(gateway: Sequence[Event], events: Sequence[Event]) -> tuple[Event, ...]:
    start, end = _sent(_first(gateway))
    return tuple(msgspec.structs.replace(event, at_us=min(start + max(0, event.at_us), end)) for event in events)


def _sent(at: Mapping[str, int]) -> tuple[int, int]:
    """Returns the time from sending the request to the worker, or to the one that went on, until the gateway had its
    end."""
    start = at.get("moved", at.get("dispatched", 0))
    end = at.get("finished")
    return start, max(start, max(at.values(), default=0) if end is None else end)


def first_us(times: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Returns the first time of each event, given events in the order of time; of `moved` the last, as the worker's own
    events are those of the last worker."""
    at: dict[str, int] = {}
    for name, at_us in times:
        if name not in at or name == "moved":
            at[name] = at_us
    return at


def _first(events: Sequence[Event]) -> dict[str, int]:
    return first_us((event.name, event.at_us) for event in events)


def _thinned(entries: Sequence[Entry]) -> list[Entry]:
    """Leaves out every second event that is neither the first of its name nor the last of all."""
    seen: set[int | str] = set()
    kept: list[Entry] = []
    is_left_out = False
    for number, one in enumerate(entries):
        if one[0] not in seen or number == len(entries) - 1:
            seen.add(one[0])
            kept.append(one)
            continue
        is_left_out = not is_left_out
        if not is_left_out:
            kept.append(one)
    return kept


def _event(packed: Entry) -> Event:
    name, *numbers = packed
    return Event(NAMES[name] if isinstance(name, int) else name, *(int(number) for number in numbers))
