"""The row of the table that says why a charge changed: `headgate usage-changes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from accounting.comparison.causes import MEANINGS
from accounting.values.periods import DAY_S, month_start
from gateway.cli.admin_commands import Fields, option, row
from gateway.cli.answers import Drawn, Grid
from gateway.cli.money import cost
from gateway.cli.times import MOMENT, MONTH

Found = Mapping[str, Any]
TIMES = ("start_time", "end_time", "before_start_time", "before_end_time")


def _periods(given: Fields) -> Fields:
    """Returns the fields with the times of the two periods. Raises UsageError."""
    month, before = given.pop("month"), given.pop("before_month")
    timed = any(given[name] is not None for name in TIMES)
    if timed == (month is not None) or (before is not None and month is None):
        raise click.UsageError("Give --period, perhaps with --before; or --from, perhaps with the other times.")
    if month is None:
        return given
    before = before or (month_start(month[0] - 1), month[0])
    return {**given, **dict(zip(TIMES, (*month, *before), strict=True))}


def _told(found: Found) -> tuple[Drawn, ...]:
    """Returns what happened in two sentences, the causes, and the models and keys that changed."""
    before, after, currency = found["before"], found["after"], found["currency"]
    difference = found["difference_micro_units"]
    moved = "more" if difference > 0 else "less"
    tenant = click.get_current_context().params["tenant"]
    charged = f"{tenant}: {_charged(before, currency)}, {_charged(after, currency)}."
    first = found["first_cause"]
    if first is None:
        return charged, "Nothing changed."
    change = f"That is {cost(abs(difference), currency)} {moved}." if difference else "The sum is the same."
    causes = [
        (
            part["cause"],
            _signed(part["amount_micro_units"], currency),
            MEANINGS[part["cause"]],
            *(_measure(part["cause"], period, currency) for period in (before, after)),
        )
        for part in found["parts"]
        if part["amount_micro_units"]
    ]
    return (
        charged,
        f"{change} First cause: {first}, {MEANINGS[first]}.",
        "",
        Grid(("cause", "amount", "what changed", "before", "after"), causes),
        *_table("model", found["models"], currency),
        *_table("api_key_id", found["api_keys"], currency),
    )


def _table(name: str, changed: list[Found], currency: str) -> tuple[Drawn, ...]:
    amounts = ("before", "after", "difference")
    rows = [
        (one[name], *(cost(one[f"{column}_micro_units"], currency) for column in amounts), *_first(one))
        for one in changed
        if one["difference_micro_units"]
    ]
    columns = (name, *amounts, *(("first cause",) if name == "model" else ()))
    return ("", Grid(columns, rows)) if rows else ()


def _first(one: Found) -> tuple[str, ...]:
    return (one["parts"][0]["cause"],) if "parts" in one else ()


_MEASURES: Mapping[str, Callable[[Found], str]] = {
    "period_length": lambda period: f"{_days(period):,.6g} days",
    "volume": lambda period: f"{period['num_model_requests'] / _days(period):,.6g} requests a day",
    "tier_mix": lambda period: _percent(period, "num_batch_requests", "num_model_requests", "of requests"),
    "prompt_length": lambda period: _each(period, "input_tokens"),
    "output_length": lambda period: _each(period, "output_tokens"),
    "cache": lambda period: _percent(period, "input_cached_tokens", "input_tokens", "of tokens"),
}
"""These are what a person compares: means over all models."""


def _measure(cause: str, period: Found, currency: str) -> str:
    if cause in ("residency", "corrections"):
        return cost(period[f"{cause}_micro_units"], currency)
    return _MEASURES[cause](period) if cause in _MEASURES else ""


def _days(period: Found) -> float:
    return float(period["end_time"] - period["start_time"]) / DAY_S


def _each(period: Found, name: str) -> str:
    num = period["num_model_requests"]
    return f"{period[name] / num:,.6g} tokens a request" if num else ""


def _percent(period: Found, part: str, whole: str, of_what: str) -> str:
    return f"{100 * period[part] / period[whole]:.1f} % {of_what}" if period[whole] else ""


def _charged(period: Found, currency: str) -> str:
    times = (MOMENT.shown(period[name]) for name in ("start_time", "end_time"))
    return f"{cost(period['charge_micro_units'], currency)} from {' to '.join(times)}"


def _signed(amount: int, currency: str) -> str:
    return f"{'+' if amount > 0 else ''}{cost(amount, currency)}"


COMMANDS: tuple[click.Command, ...] = (
    row(
        "usage-changes TENANT",
        "Say why the charge of TENANT changed between two periods, first cause first. The parts add up to the"
        " difference.",
        "GET /admin/v1/usage/changes",
        option("--period", "month", type=MONTH, help="Month that is explained; a month that still runs ends now."),
        option(
            "--before", "before_month", type=MONTH, help="Month that it is compared with.  [default: the month before]"
        ),
        option("--from", "start_time", type=MOMENT, help="Start of what is explained, instead of --period."),
        option("--to", "end_time", type=MOMENT, help="End of what is explained, not included.  [default: now]"),
        option(
            "--before-from",
            "before_start_time",
            type=MOMENT,
            help="Start of what it is compared with.  [default: the same length of time before --from]",
        ),
        option(
            "--before-to",
            "before_end_time",
            type=MOMENT,
            help="End of what it is compared with.  [default: the same length of time from --before-from]",
        ),
        option("--key", "api_key_id", help="Id of the one API key.  [default: every key]"),
        option("--model", help="Id of the one model.  [default: every model]"),
        shows=_told,
        reads=_periods,
        with_archived=True,
        example="usage-changes acme --period 2026-10\nusage-changes acme --from 2026-10-20 --to 2026-10-27 --key key_0123",
    ),
)
