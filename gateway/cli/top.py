"""`headgate top`: who is served now, drawn again every few seconds. On a terminal it fills the screen; elsewhere it prints
plain tables.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.cli.answers import Grid, drawn, one_sentence, show
from gateway.cli.api import PROJECTS, AdminApi, ApiFailed
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.money import cost
from gateway.cli.status import kv_used
from gateway.cli.times import moment

TENANTS = (
    *("tenant", "running", "waiting", "oldest wait", "share", "promised", "requests/min", "tokens/min"),
    *("cached (24 h)", "this month"),
)
WORKERS = (
    "worker",
    "model",
    "state",
    "running",
    "waiting",
    "KV used",
    "cached KV",
    "prefill tok/s",
    "decode tok/s",
    "wait",
)
MAX_TENANTS = 40


@click.command(epilog=example_text("top\ntop --interval 5\ntop --frames 3 > load.txt"))
@click.option(
    "--interval",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.5, 3600),
    metavar="S",
    help="Seconds between two looks.",
)
@click.option(
    "--frames",
    type=click.IntRange(1, 1_000_000_000),
    help="Number of looks.  [default: until Ctrl-C on a terminal, else 1]",
)
@home_option
@json_option
def top(interval: float, frames: int | None, home: Path, as_json: bool) -> None:
    """Show who is served now: tenants with their shares and waits, workers with their queues and caches.

    Running and waiting requests are those of this moment; shares and rates are of the last 10 minutes.
    """
    console = Console()
    on_screen = console.is_terminal and not as_json
    rounds: Iterator[int] = itertools.count() if frames is None and on_screen else iter(range(frames or 1))
    with one_sentence():
        api = AdminApi(home)
        if on_screen:
            _on_screen(api, console, rounds, interval)
            return
        for number in rounds:
            time.sleep(interval if number else 0)
            frame = look(api)
            _print(frame, as_json)


def _print(frame: Frame, as_json: bool) -> None:
    show(frame.raw, lambda _: frame.text(), as_json)


def _on_screen(api: AdminApi, console: Console, rounds: Iterator[int], interval: float) -> None:
    """Draws frames until Ctrl-C. A gateway that does not answer for a while is said on the screen."""
    drawn_frame: RenderableType = look(api).screen()
    try:
        with Live(drawn_frame, console=console, screen=True, auto_refresh=False) as live:
            for number in rounds:
                if number:
                    time.sleep(interval)
                    try:
                        drawn_frame = look(api).screen()
                    except ApiFailed as error:
                        drawn_frame = Text(str(error), style="bold red")
                live.update(drawn_frame, refresh=True)
    except KeyboardInterrupt:
        return


@dataclass(frozen=True, slots=True)
class Frame:
    """The result of one look."""

    title: str
    tenants: Grid
    workers: Grid
    notes: tuple[str, ...]
    raw: Mapping[str, Any]

    def text(self) -> tuple[Grid | str, ...]:
        return (self.title, "", self.tenants, "", self.workers, *self.notes)

    def screen(self) -> RenderableType:
        notes = [Text(note, style="yellow") for note in self.notes]
        parts: list[RenderableType] = [
            Text(self.title, style="bold"),
            Text(""),
            drawn(self.tenants),
            Text(""),
            drawn(self.workers),
            *notes,
        ]
        return Group(*parts, Text("Ctrl-C ends it.", style="dim"))


def look(api: AdminApi) -> Frame:
    """Asks once. Raises ApiFailed."""
    fair, cache = api.call("GET", "/admin/v1/fairness"), api.call("GET", "/admin/v1/cache")
    workers = api.read("/admin/v1/workers", {})
    spent = api.call("GET", "/admin/v1/usage/summary")
    names = {one["id"]: one["name"] for one in api.read(PROJECTS, {"include_archived": "true"})}
    raw = {"at": int(time.time()), "fairness": fair, "cache": cache, "workers": workers, "summary": spent}
    running, waiting = (sum(one[name] for one in workers) for name in ("running", "waiting"))
    today = ", ".join(cost(one["today_micro_units"], one["currency"]) for one in spent["spending"])
    title = f"{moment(raw['at'])} UTC   {api.url}   {running} running, {waiting} waiting" + (
        f"   today {today}" if today else ""
    )
    rows = sorted(
        (
            _tenant(one, fair, _by_tenant(cache["tenants"]), _by_tenant(spent["top_tenants"]), names)
            for one in fair["tenants"]
        ),
        key=lambda row: (-row[1], -row[2], str(row[0])),
    )
    num_more = len(rows) - MAX_TENANTS
    notes = (f"{num_more} further tenants are not shown.",) if num_more > 0 else ()
    if not rows:
        notes = (*notes, "No tenant was served in the last 10 minutes.")
    return Frame(title, Grid(TENANTS, rows[:MAX_TENANTS]), Grid(WORKERS, [_worker(one) for one in workers]), notes, raw)


def _by_tenant(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    by_id: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        by_id.setdefault(one["project_id"], []).append(one)
    return by_id


def _tenant(
    one: Mapping[str, Any],
    fair: Mapping[str, Any],
    cached: Mapping[str, Sequence[Mapping[str, Any]]],
    spent: Mapping[str, Sequence[Mapping[str, Any]]],
    names: Mapping[str, str],
) -> tuple[Any, ...]:
    tenant = one["project_id"]
    minutes = max(1.0, (fair["end_time"] - fair["start_time"]) / 60)
    month = ", ".join(cost(each["month_micro_units"], each["currency"]) for each in spent.get(tenant, ()))
    return (
        names.get(tenant, tenant),
        one["running"],
        one["waiting"],
        _seconds(one["oldest_wait_ms"]) if one["waiting"] else "",
        _percent(one["received_share"]),
        _percent(one["promised_share"]),
        f"{one['num_requests'] / minutes:.1f}",
        f"{one['service_tokens'] / minutes:,.0f}",
        _percent(next((each["cached_share"] for each in cached.get(tenant, ())), None)),
        month,
    )


def _worker(one: Mapping[str, Any]) -> tuple[Any, ...]:
    blocks = one["blocks"]
    return (
        one["id"],
        one["model"],
        one["state"],
        one["running"],
        one["waiting"],
        kv_used(blocks),
        f"{100 * blocks['evictable'] / max(1, blocks['total']):.0f} %",
        f"{one['prefill_tokens_per_s'] or 0:,.0f}",
        f"{one['decode_tokens_per_s'] or 0:,.0f}",
        _seconds(one["predicted_wait_ms"]),
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _seconds(ms: float | None) -> str:
    return "" if ms is None else f"{ms / 1000:.1f} s"


COMMANDS: tuple[click.Command, ...] = (top,)
