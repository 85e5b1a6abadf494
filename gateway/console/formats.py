"""How pages write numbers, money and times. The functions are pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from gateway.schema.money import grouped

NONE = "–"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def money(micro_units: int | None, currency: str | None = "") -> str:
    """Returns `1,234.500000 USD` for 1,234,500,000 micro-units."""
    if micro_units is None:
        return NONE
    return f"{grouped(micro_units)} {currency or ''}".strip()


def share(value: float | None) -> str:
    return NONE if value is None else f"{value * 100:.1f} %"


def duration(ms: float | None) -> str:
    if ms is None:
        return NONE
    if ms < 1000:
        return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2f} ms"
    return f"{ms / 1000:.2f} s"


def moment(seconds: float | None) -> Markup | str:
    """Returns a `time` element in UTC. The page's script writes it in the viewer's zone; UTC stays in its title."""
    if seconds is None:
        return NONE
    utc = time.gmtime(seconds)
    shown = time.strftime("%Y-%m-%d %H:%M:%S", utc)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", utc), shown, shown
    )


FILTERS: dict[str, Callable[..., Any]] = {
    "count": count,
    "money": money,
    "share": share,
    "duration": duration,
    "moment": moment,
}
