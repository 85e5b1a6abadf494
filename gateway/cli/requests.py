"""`headgate requests`: the request log, and one request with its waterfall. The command uses the same HTTP API as any
program.

What a client named itself (its end user, its metadata) is shown with control characters written out and without markup,
and JSON is plain ASCII: a client cannot control a terminal.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from accounting.values.types import OPERATOR_TENANT
from gateway.cli import answers
from gateway.cli.answers import FIELDS, Grid, one_sentence
from gateway.cli.api import AdminApi, segment
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.groups import Commands
from gateway.cli.money import cost, shown
from gateway.cli.times import MOMENT, refuse_empty_span

PATH = "/admin/v1/requests"
PAGE = 100
MAX_MS = 2**48
MOST_AT_ONCE = 2_000
"""The most requests that one look of `follow` finds."""
LOGGED_WITHIN_S = 600
"""A request is logged when it has ended; one that runs longer is not followed."""
COLUMNS = (
    "time (UTC)",
    "id",
    "tenant",
    "model",
    "status",
    "error",
    "prompt",
    "cached",
    "output",
    "cost",
    "ttft",
    "took",
)
BAR_CHARS = 48
OUTCOMES = ("ok", "client_error", "refused", "server_error", "client_gone")


@click.group(cls=Commands)
def requests() -> None:
    """Read the request log: every request of a known key, refused ones too. It holds no prompts."""


@requests.command("list")
@click.option("--tenant", help="Id or name.")
@click.option("--key", "api_key_id", help="Id of an API key.")
@click.option("--model", help="The model that was asked for.")
@click.option("--status", "status_class", type=click.Choice(["2xx", "4xx", "5xx"]), help="The class of the status.")
@click.option("--outcome", type=click.Choice(OUTCOMES), help="How it ended; a stream can fail after status 200.")
@click.option("--error", "error_code", help="The error code of a request that failed, such as `rate_limit_exceeded`.")
@click.option("--tier", "service_tier", type=click.Choice(["default", "batch"]), help="The service tier.")
@click.option("--batch", "batch_id", help="The id of the batch whose lines they are.")
@click.option("--end-user", help="The end user that the client named.")
@click.option("--trace", "trace_id", help="The trace id of a ledger entry.")
@click.option("--from", "start_time", type=MOMENT, help="Accepted at this time or later.")
@click.option("--to", "end_time", type=MOMENT, help="Accepted before this time.")
@click.option(
    "--min-duration", "min_duration_ms", type=click.IntRange(0, MAX_MS), metavar="MS", help="At least so long."
)
@click.option("--limit", default=PAGE, show_default=True, type=click.IntRange(min=1), help="The most requests to list.")
@home_option
@json_option
def list_requests(tenant: str | None, limit: int, home: Path, as_json: bool, **asked: Any) -> None:
    """List requests, the newest first."""
    refuse_empty_span(asked["start_time"], asked["end_time"])
    with one_sentence():
        api = AdminApi(home)
        found = _newest(api, _params(api, tenant, asked), limit)
    if as_json:
        click.echo(json.dumps(found))
        return
    with one_sentence():
        found = api.named(found)
    answers.show(found, Grid(COLUMNS, [_row(one) for one in found]), False)


@requests.command("follow", epilog=example_text("requests follow --tenant acme\nrequests follow --json | jq .id"))
@click.option("--tenant", help="Id or name of the one tenant.  [default: every tenant]")
@click.option("--model", help="The one model.  [default: every model]")
@click.option(
    "--interval",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.2, 60),
    metavar="S",
    help="Seconds between two looks.",
)
@click.option(
    "--number", type=click.IntRange(1, 1_000_000_000), help="End after this number of requests.  [default: at Ctrl-C]"
)
@home_option
@json_option
def follow(
    tenant: str | None, model: str | None, interval: float, number: int | None, home: Path, as_json: bool
) -> None:
    """Print each request as it ends, from now on, one line each."""
    with one_sentence():
        api = AdminApi(home)
        params = _params(api, tenant, {"model": model})
        try:
            for one in itertools.islice(_as_they_end(api, params, interval), number):
                click.echo(json.dumps(one) if as_json else _line(api.named(one)))
        except KeyboardInterrupt:
            return


def _params(api: AdminApi, tenant: str | None, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the filters that are given, by their names in the API."""
    params = {name: value for name, value in asked.items() if value is not None}
    return params if tenant is None else {**params, "project_id": api.project(tenant, archived=True)["id"]}


def _as_they_end(api: AdminApi, params: Mapping[str, Any], interval: float) -> Iterator[dict[str, Any]]:
    """Yields requests once each, in the order in which they are logged. One that began before a look may be logged after
    it, so each look goes back by the longest time that a request takes to appear, and leaves out what the look before had.
    """

    def look() -> dict[str, dict[str, Any]]:
        wanted = {**params, "start_time": int(time.time()) - LOGGED_WITHIN_S}
        return {one["id"]: one for one in reversed(_newest(api, wanted, MOST_AT_ONCE))}

    seen = look()
    while True:
        time.sleep(interval)
        found = look()
        for name, one in found.items():
            if name not in seen and one["project_id"] != OPERATOR_TENANT:
                yield one
        seen = found


def _line(one: Mapping[str, Any]) -> str:
    usage = one["usage"]
    parts = [
        _time(one["created_at_ms"]),
        one["id"],
        one["tenant"],
        one["model"],
        str(one["status"]),
        one["error_code"] or (one["outcome"] if one["outcome"] != "ok" else ""),
        f"{usage['prompt_tokens']} in ({usage['cached_tokens']} cached) {usage['completion_tokens']} out",
        cost(one["charge_micro_units"], one["currency"]),
        f"ttft {_duration(one['ttft_ms'])}" if one["ttft_ms"] is not None else "",
        f"took {_duration(one['duration_ms'])}",
    ]
    return "  ".join(answers.harmless(part) for part in parts if part)


@requests.command("show")
@click.argument("request_id")
@home_option
@json_option
def show(request_id: str, home: Path, as_json: bool) -> None:
    """Show one request: its fields, and a waterfall of where its time went."""
    with one_sentence():
        found = AdminApi(home).call("GET", f"{PATH}/{segment(request_id)}")
    if as_json:
        click.echo(json.dumps(found))
        return
    timeline, price = found.pop("timeline"), found.pop("price")
    found |= {"price": _price(price, found["currency"])} if price else {}
    rows = [(name, value) for name, value in _flat(found, found["currency"]) if value is not None]
    answers.show(found, Grid(FIELDS, rows), False)
    for line in waterfall(timeline["phases"], found["duration_ms"]):
        click.echo(line)


def waterfall(phases: Sequence[Mapping[str, Any]], duration_ms: float) -> Iterator[str]:
    """Yields a line for each phase, with a bar from its start to its end."""
    whole_ms = max([duration_ms, *(phase["end_ms"] for phase in phases)], default=0) or 1
    names = [_label(phase) for phase in phases]
    width = max(map(len, names), default=0)
    if phases:
        yield ""
    for name, phase in zip(names, phases, strict=True):
        first = min(int(phase["start_ms"] / whole_ms * BAR_CHARS), BAR_CHARS - 1)
        length = max(1, round((phase["end_ms"] - phase["start_ms"]) / whole_ms * BAR_CHARS))
        bar = (" " * first + "#" * length)[:BAR_CHARS].ljust(BAR_CHARS)
        took = f"{phase['end_ms'] - phase['start_ms']:,.1f}"
        yield f"{name:<{width}} |{bar}| {phase['start_ms']:>10,.1f} ms  {took:>10} ms"


def _label(phase: Mapping[str, Any]) -> str:
    name = "".join(char for char in phase["name"] if char.isprintable())
    return f"{name} ({phase['num_tokens']} tokens)" if phase.get("num_tokens") else name


def _newest(api: AdminApi, params: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Reads pages until there are enough requests. A page may be empty although there is more."""
    found: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while len(found) < limit:
        page = api.call("GET", PATH, params={**params, **after, "limit": min(PAGE, limit - len(found))})
        found += page["data"]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    return found


def _row(one: Mapping[str, Any]) -> tuple[Any, ...]:
    usage = one["usage"]
    return (
        _time(one["created_at_ms"]),
        one["id"],
        one.get("tenant", one["project_id"]),
        one["model"],
        one["status"],
        one["error_code"] or (one["outcome"] if one["outcome"] != "ok" else ""),
        usage["prompt_tokens"],
        usage["cached_tokens"],
        usage["completion_tokens"],
        cost(one["charge_micro_units"], one["currency"]),
        _duration(one["ttft_ms"]),
        _duration(one["duration_ms"]),
    )


def _time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_ms // 1000)) + f".{at_ms % 1000:03d}"


def _duration(ms: int | None) -> str:
    return "" if ms is None else f"{ms / 1000:.3f} s"


def _price(price: Mapping[str, Any], currency: str) -> dict[str, Any]:
    """Returns a line for each part of the charge: tokens, their rate and the amount."""
    lines = {"version": price["version"], "is_reversed": price["is_reversed"]}
    for part in price["parts"]:
        rate = part["rate_micro_units_per_million"]
        per = "" if rate is None else f" x {shown(rate, currency)} per million"
        lines[part["part"]] = f"{part['quantity']} tokens{per} = {cost(part['amount_micro_units'], currency)}"
    return lines


def _flat(found: Mapping[str, Any], currency: str | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, currency, f"{prefix}{name}.")
        elif name == "created_at_ms":
            yield f"{prefix}time (UTC)", _time(value)
        elif name.endswith("_micro_units") and isinstance(value, int):
            yield prefix + name.removesuffix("_micro_units"), cost(value, currency)
        elif name != "created_at":
            yield prefix + name, value


COMMANDS: tuple[click.Command, ...] = (requests,)
