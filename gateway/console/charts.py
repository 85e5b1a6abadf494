"""Charts as figures for SVG: pure functions from values to places and sizes. Templates draw them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.console import formats

NUM_BARS = 48
NUM_TICKS = 4
"""The steps of an axis at most."""
NUM_MARKS = 7
"""The labels below a chart at most."""
Write = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis. `at` is per cent of its length, from the left or from the top."""

    label: str
    at: float
    moment: int | None = None
    """The Unix second that the label says in UTC. The page's script writes it in the viewer's zone. None for a label that
    is no moment, such as a whole day of UTC.
    """


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar. `y` and `height` are per cent of the chart's height."""

    number: int
    """Its place among the chart's names, which gives its colour."""
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Bar:
    """`x` and `width` are per cent of the chart's width: the place that the bar has to itself."""

    label: str
    x: float
    width: float
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Bars:
    bars: Sequence[Bar]
    names: Sequence[str]
    ticks: Sequence[Tick]
    """The ticks of the value axis, the lowest first."""
    marks: Sequence[Tick]
    """The ticks of the time axis, which is below the bars."""


def stacked(
    values: Sequence[tuple[str, Mapping[str, float]]],
    names: Sequence[str],
    write: Write = formats.short_count,
    below: Sequence[str] = (),
    moments: Sequence[int] = (),
) -> Bars:
    """Returns bars of `values`: pairs of a label and the parts' values, none negative. `names` orders the parts, `write`
    writes the axis of values, and `below` has a short label for each bar, `moments` the second that it says, if any."""
    top, ticks = axis(max((sum(parts.values()) for _, parts in values), default=0), write)
    width = 100 / max(1, len(values))
    bars = []
    for place, (label, parts) in enumerate(values):
        under = 0.0
        drawn = []
        for number, name in enumerate(names):
            height = 100 * parts.get(name, 0) / top
            under += height
            if height:
                drawn.append(Part(number, round(100 - under, 3), round(height, 3)))
        bars.append(Bar(label, round(place * width, 3), round(width, 3), drawn))
    return Bars(bars, names, ticks, marks(below, moments))


def axis(most: float, write: Write) -> tuple[float, Sequence[Tick]]:
    """Returns where the axis of values up to `most` ends, and its ticks: round numbers, the lowest first."""
    step = _round_step(most / NUM_TICKS)
    num_steps = max(1, math.ceil(most / step))
    top = step * num_steps
    return top, [Tick(write(step * n), round(100 - 100 * n / num_steps, 3)) for n in range(num_steps + 1)]


def _round_step(least: float) -> float:
    """Returns the smallest of 1, 2, 5, 10, 20, 50, ... that is no smaller. Values are whole numbers of their unit."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def marks(labels: Sequence[str], moments: Sequence[int] = ()) -> Sequence[Tick]:
    """Returns the labels that have room below a chart, each below the middle of its bar."""
    every = max(1, math.ceil(len(labels) / NUM_MARKS))
    return [
        Tick(labels[n], round(100 * (n + 0.5) / len(labels), 3), moments[n] if moments else None)
        for n in range(0, len(labels), every)
    ]


def counted(buckets: Sequence[Mapping[str, Any]]) -> Bars:
    """Returns the number of requests over time, failed ones apart, from the buckets of the API."""
    starts = [one["start_ms"] / 1000 for one in buckets]
    is_long = len(starts) > 1 and starts[-1] - starts[0] > 2 * 86_400
    return stacked(
        [
            (
                f"{_at(one['start_ms'] / 1000)}: {one['num_requests']:,} requests, {one['num_failed']:,} failed",
                {"answered": one["num_requests"] - one["num_failed"], "failed": one["num_failed"]},
            )
            for one in buckets
        ],
        ("answered", "failed"),
        below=[time.strftime("%m-%d" if is_long else "%H:%M", time.gmtime(start)) for start in starts],
        moments=[int(start) for start in starts],
    )


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


@dataclass(frozen=True, slots=True)
class Month:
    """A month's spending as lines: what is spent until each day, the band of the forecast, the cap. Points are pairs of
    per cent from the left and from the top, as `points` of SVG."""

    spent: str
    band: str
    expected: str
    cap: float | None
    """The height of the cap; None without one."""
    ticks: Sequence[Tick]
    marks: Sequence[Tick]


def month(
    days: Sequence[float], num_days: int, until: float, forecast: Mapping[str, Any] | None, cap: int | None
) -> Month:
    """Draws the sums `days` at the ends of the month's first days; the last of them is that of now, `until` days into
    the month. A cap that lies far above everything else is left out, because the lines below it would be flat."""
    high = max([days[-1], forecast["high_micro_units"] if forecast else 0], default=0)
    shown_cap = cap if cap is not None and cap <= 4 * max(high, 1) else None
    top, ticks = axis(max(high, shown_cap or 0), formats.short_money)

    def point(day: float, value: float) -> str:
        return f"{round(100 * day / num_days, 2)},{round(100 - 100 * value / top, 2)}"

    ends = [*range(1, len(days)), until]
    spent = [point(0, 0), *(point(day, value) for day, value in zip(ends, days, strict=True))]
    band = expected = ""
    if forecast is not None:
        now = point(until, days[-1])
        low, middle, most = (forecast[f"{name}_micro_units"] for name in ("low", "expected", "high"))
        band = f"{now} {point(num_days, most)} {point(num_days, low)}"
        expected = f"{now} {point(num_days, middle)}"
    return Month(
        " ".join(spent),
        band,
        expected,
        None if shown_cap is None else round(100 - 100 * shown_cap / top, 2),
        ticks,
        marks([str(day) for day in range(1, num_days + 1)]),
    )


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
    whole = _whole(phases, duration_ms)
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


def time_ticks(phases: Sequence[Mapping[str, Any]], duration_ms: float) -> Sequence[Tick]:
    """Returns the ticks above a waterfall: round times from its start, in per cent from the left."""
    whole = _whole(phases, duration_ms)
    step = _round_step(1000 * whole / (NUM_TICKS + 1)) / 1000
    return [Tick(formats.duration(n * step), round(100 * n * step / whole, 3)) for n in range(int(whole / step) + 1)]


def _whole(phases: Sequence[Mapping[str, Any]], duration_ms: float) -> float:
    return max([duration_ms, *(phase["end_ms"] for phase in phases)], default=0) or 1


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
