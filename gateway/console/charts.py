"""Charts as figures for SVG: pure functions from values to places and sizes. Templates draw them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUM_BARS = 48


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar. `y` and `height` are per cent of the chart's height."""

    name: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Bars:
    bars: Sequence[Bar]
    names: Sequence[str]
    highest: str


def stacked(values: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str], highest: str = "") -> Bars:
    """Returns bars of `values`: pairs of a label and the parts' values, none negative. `names` orders the parts."""
    most = max((sum(parts.values()) for _, parts in values), default=0) or 1
    bars = []
    for label, parts in values:
        below = 0.0
        drawn = []
        for name in names:
            height = 100 * parts.get(name, 0) / most
            below += height
            drawn.append(Part(name, round(100 - below, 3), round(height, 3)))
        bars.append(Bar(label, drawn))
    return Bars(bars, names, highest or f"{most:,.0f}")


def volume(requests: Sequence[tuple[float, bool]]) -> Bars | None:
    """Returns the number of requests over time, failed ones apart. `requests` are pairs of Unix seconds and whether
    the request failed. None if there are fewer than two."""
    if len(requests) < 2:
        return None
    first, last = min(at for at, _ in requests), max(at for at, _ in requests)
    width = max((last - first) / NUM_BARS, 1e-3)
    counts = [{"answered": 0.0, "failed": 0.0} for _ in range(NUM_BARS)]
    for at, has_failed in requests:
        counts[min(int((at - first) / width), NUM_BARS - 1)]["failed" if has_failed else "answered"] += 1
    return stacked([(_at(first + i * width), parts) for i, parts in enumerate(counts)], ("answered", "failed"))


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


@dataclass(frozen=True, slots=True)
class Interval:
    """A row of a waterfall. `x` and `width` are per cent of the whole time."""

    name: str
    x: float
    width: float
    start_ms: float
    end_ms: float
    num_tokens: int
    is_critical: bool
    """Whether the request would have ended sooner if this interval had been shorter."""


def waterfall(phases: Sequence[Mapping[str, Any]], duration_ms: float) -> Sequence[Interval]:
    whole = max([duration_ms, *(phase["end_ms"] for phase in phases)], default=0) or 1
    critical = _critical(phases)
    return [
        Interval(
            phase["name"],
            round(100 * phase["start_ms"] / whole, 3),
            round(max(100 * (phase["end_ms"] - phase["start_ms"]) / whole, 0.2), 3),
            phase["start_ms"],
            phase["end_ms"],
            phase.get("num_tokens", 0),
            i in critical,
        )
        for i, phase in enumerate(phases)
    ]


def _critical(phases: Sequence[Mapping[str, Any]]) -> set[int]:
    """Returns the phases of the critical path: from the end backwards, always the one that ended last before."""
    found: set[int] = set()
    until = float("inf")
    while True:
        before = [i for i, phase in enumerate(phases) if phase["end_ms"] <= until and i not in found]
        if not before:
            return found
        last = max(before, key=lambda i: (phases[i]["end_ms"], -phases[i]["start_ms"]))
        found.add(last)
        until = phases[last]["start_ms"]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one horizontal line. `x` and `width` are per cent of the line."""

    name: str
    x: float
    width: float
    value: float


def line_of(values: Sequence[tuple[str, float]], whole: float | None = None) -> Sequence[Slice]:
    """Returns the parts of a line that is `whole` long, or as long as all parts together. No value is negative."""
    length = (sum(value for _, value in values) if whole is None else whole) or 1
    slices, x = [], 0.0
    for name, value in values:
        width = 100 * value / length
        slices.append(Slice(name, round(x, 3), round(width, 3), value))
        x += width
    return slices
