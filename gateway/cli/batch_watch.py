"""A batch while it runs: a line that is drawn again on a terminal, or one for each change elsewhere, on standard error."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from accounting.values.types import ENDED_BATCH
from gateway.cli.answers import FIELDS, Drawn, Grid
from gateway.cli.api import ApiFailed, NotThere, TenantApi, segment
from gateway.cli.exit_codes import INTERRUPTED
from gateway.cli.money import cost

LOOK_S = 1.0
SILENT_S = 60.0
"""The longest time that a server may not answer: one that restarts does not end the watch."""
TOLD_EVERY_S = 10.0
"""The time between two lines of progress where standard error is no terminal."""
BAR_CHARS = 24


def watch(api: TenantApi, batch: dict[str, Any], interval_s: float, *, quiet: bool) -> dict[str, Any]:
    """Shows progress until the batch has ended. Returns it as it is then. Ctrl-C ends the watch alone. Raises
    `ApiFailed`.
    """
    console = Console(stderr=True)
    try:
        if quiet or not console.is_terminal:
            return _told(api, batch, interval_s, quiet=quiet)
        with Live(Text(line(batch)), console=console, auto_refresh=False, transient=True) as live:
            while batch["status"] not in ENDED_BATCH:
                time.sleep(interval_s)
                batch = _look(api, batch["id"])
                live.update(Text(line(batch)), refresh=True)
        return batch
    except KeyboardInterrupt:
        click.echo(
            f"headgate: The batch runs on. `headgate batches watch {batch['id']}` shows it again, and"
            f" `headgate batches cancel {batch['id']}` ends it.",
            err=True,
        )
        raise SystemExit(INTERRUPTED) from None


def _told(api: TenantApi, batch: dict[str, Any], interval_s: float, *, quiet: bool) -> dict[str, Any]:
    told, told_at = "", 0.0
    while True:
        now = time.monotonic()
        if not quiet and (batch["status"] != told or now - told_at >= TOLD_EVERY_S):
            click.echo(line(batch), err=True)
            told, told_at = batch["status"], now
        if batch["status"] in ENDED_BATCH:
            return batch
        time.sleep(interval_s)
        batch = _look(api, batch["id"])


def _look(api: TenantApi, batch_id: str) -> dict[str, Any]:
    """Returns the batch. A server that does not answer is asked again for a while. Raises `ApiFailed`."""
    until = time.monotonic() + SILENT_S
    while True:
        try:
            return api.call("GET", f"/v1/batches/{segment(batch_id)}")
        except NotThere:
            raise
        except ApiFailed as failed:
            if failed.code not in (None, "database_unavailable", "server_draining") or time.monotonic() > until:
                raise
            time.sleep(LOOK_S)


def line(batch: dict[str, Any]) -> str:
    """Returns the progress in one line."""
    counts, own = batch["request_counts"], batch["headgate"]
    ended, total = counts["completed"] + counts["failed"], counts["total"]
    parts = [batch["status"].replace("_", " ")]
    if total:
        filled = BAR_CHARS * ended // total
        parts.append(f"[{'#' * filled}{'.' * (BAR_CHARS - filled)}] {ended:,} of {total:,} lines")
    if counts["failed"]:
        parts.append(f"{counts['failed']:,} failed")
    if own["paused_reason"]:
        parts.append(f"paused: {own['paused_reason']}")
    if own["lines_per_s"] is not None:
        parts.append(f"{own['lines_per_s']:g} lines/s")
    if own["eta_s"] is not None:
        parts.append(f"{duration(own['eta_s'])} left")
    parts.append(cost(own["charge_micro_units"], own["currency"]))
    return ", ".join(parts)


def duration(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def whole(batch: dict[str, Any]) -> tuple[Drawn, ...]:
    """Returns the tables of a batch: its fields, failed lines by how they failed, faults of its input."""
    counts, own, usage = batch["request_counts"], batch["headgate"], batch["usage"]
    share = own["cached_share"]
    rows: list[tuple[str, Any]] = [
        ("id", batch["id"]),
        ("status", batch["status"].replace("_", " ")),
        ("paused", own["paused_reason"]),
        ("model", batch["model"]),
        ("endpoint", batch["endpoint"]),
        ("lines", f"{counts['total']:,}"),
        ("answered", f"{counts['completed']:,}"),
        ("failed", f"{counts['failed']:,}"),
        ("cost so far", cost(own["charge_micro_units"], own["currency"])),
        ("prompt tokens", f"{usage['input_tokens']:,}" + ("" if share is None else f", {share:.1%} of them cached")),
        ("output tokens", f"{usage['output_tokens']:,}"),
        ("lines per second", own["lines_per_s"]),
        ("time left", None if own["eta_s"] is None else duration(own["eta_s"])),
        *((name, batch[name]) for name in batch if name.endswith("_at")),
        *((name, batch[name]) for name in ("input_file_id", "output_file_id", "error_file_id")),
    ]
    grids: list[Drawn] = [Grid(FIELDS, [row for row in rows if row[1] is not None])]
    if failures := own.get("failures"):
        columns = ("state", "status", "error_code", "num_lines")
        grids.append(Grid(columns, [[one[name] for name in columns] for one in failures]))
    if faults := (batch["errors"] or {}).get("data"):
        grids.append(Grid(("line", "code", "message"), [(one["line"], one["code"], one["message"]) for one in faults]))
    return tuple(grids)


def failure(batch: dict[str, Any]) -> str | None:
    """Returns a sentence about a batch that has ended otherwise than completed."""
    said = {
        "failed": "The batch has failed.",
        "cancelled": "The batch was cancelled.",
        "expired": "The batch has expired.",
    }
    faults = (batch["errors"] or {}).get("data") or [{}]
    because = f" Line {faults[0]['line']}: {faults[0]['message']}" if faults[0].get("line") else ""
    return said[batch["status"]] + because if batch["status"] in said else None
