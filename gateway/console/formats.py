"""How pages write numbers, money and times. The functions are pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from gateway.schema.money import MICRO_UNITS, grouped

NONE = "–"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def money(micro_units: int | None, currency: str | None = "") -> str:
    """Returns `1,234.500000 USD` for 1,234,500,000 micro-units."""
    if micro_units is None:
        return NONE
    return f"{grouped(micro_units)} {currency or ''}".strip()


def amount(micro_units: int | None, currency: str | None = "") -> Markup | str:
    """Returns an amount that is read at a glance: two places from 1 on. The exact amount stands in its title."""
    exact = money(micro_units, currency)
    if micro_units is None or abs(micro_units) < MICRO_UNITS:
        return exact
    rounded = f"{micro_units / MICRO_UNITS:,.2f} {currency or ''}".strip()
    return Markup('<span title="{}">{}</span>').format(exact, rounded)


def short_money(micro_units: float) -> str:
    """Returns an amount without its currency and without needless zeros, for an axis."""
    text = f"{micro_units / MICRO_UNITS:,.6f}"
    return text.rstrip("0").rstrip(".")


def short_count(value: float) -> str:
    """Returns `1.5 M` for 1,500,000, for an axis."""
    for least, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / unit:.4g} {name}"
    return f"{value:,.0f}"


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
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(iso(seconds), shown, shown)


def iso(seconds: float) -> str:
    """Returns a moment in UTC as a script reads it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


TONES = {
    "good": ("active", "answered", "completed", "delivered", "enabled", "holds", "in force", "ok", "paid", "ready"),
    "bad": ("archived", "dead", "disabled", "expired", "failed", "fails", "lost", "server_error", "void", "revoked"),
    "warn": ("client_error", "client_gone", "draining", "refused", "suspended", "cancelled", "cancelling", "paused"),
}
_TONE_OF = {word: tone for tone, words in TONES.items() for word in words}


def tone(state: object) -> str:
    """Returns how a state is coloured: good, bad, warn, or plain for what is neither. A status is read as a number."""
    if isinstance(state, int):
        return "good" if state < 400 else "warn" if state < 500 else "bad"
    return _TONE_OF.get(str(state).lower(), "plain")


FILTERS: dict[str, Callable[..., Any]] = {
    "count": count,
    "money": money,
    "amount": amount,
    "tone": tone,
    "share": share,
    "duration": duration,
    "moment": moment,
    "iso": iso,
}
