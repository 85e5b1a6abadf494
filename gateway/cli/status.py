"""`headgate status`: what runs, where, since when, whether it is healthy, and what the last check of the books said."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gateway.base.home import Home
from gateway.cli import processes
from gateway.cli.answers import Grid, one_sentence, show
from gateway.cli.api import AdminApi, ApiFailed, running
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.exit_codes import FAILED
from gateway.cli.times import ago, moment

COLUMNS = ("process", "pid", "since (UTC)", "memory", "cpu", "state")
HEALTHY = ("ok", "ready")


@click.command(epilog=example_text("status\nstatus --json"))
@home_option
@json_option
def status(home: Path, as_json: bool) -> None:
    """Say what runs, where, since when, and whether it is healthy. It ends with status 1 if something is not.

    Without an admin key (HEADGATE_API_KEY, or that of the home) workers and books are not looked at, which its output
    says: status 0 is then about the gateway's own checks and the processes of this machine alone.
    """
    with one_sentence():
        found = _found(AdminApi(home))
    show(found, lambda _: tuple(_drawn(found)), as_json)
    if not found["healthy"]:
        raise SystemExit(FAILED)


def _found(api: AdminApi) -> dict[str, Any]:
    """Asks the gateway and the kernel. Raises `ApiFailed` if no gateway answers."""
    ready = api.ready()
    books, workers, unseen = _of_operator(api)
    local = _local(Home(api.home), api.url)
    states = {"gateway": ready["status"], **{one["id"]: one["state"] for one in workers}}
    for one in local:
        one["state"] = _state(one, states)
    dead = [one["name"] for one in local if one["pid"] and one["state"] == "gone"]
    failing = [one for one in workers if one["state"] not in HEALTHY]
    return {
        "version": importlib.metadata.version("headgate"),
        "url": f"{api.url}/v1",
        "console": f"{api.url}/console",
        "home": str(api.home),
        "healthy": ready["status"] == "ok" and not dead and not failing and not (books and _failed(books)),
        "status": ready["status"],
        "checks": ready.get("checks", []),
        "processes": local,
        "workers": workers,
        "books": books,
        "not_looked_at": unseen,
    }


def _of_operator(api: AdminApi) -> tuple[dict[str, Any] | None, list[dict[str, Any]], str | None]:
    """Returns the state of the books and the workers; or neither, and why they were not looked at."""
    try:
        return api.call("GET", "/admin/v1/books"), api.read("/admin/v1/workers", {}), None
    except ApiFailed as error:
        return None, [], str(error)


def _local(home: Home, url: str) -> list[dict[str, Any]]:
    """Returns the processes of this machine, if the gateway is that of the home."""
    ready = running(home)
    if ready is None or ready.base_url != url:
        return []
    found = []
    for name, pid in ready.processes.items():
        one = processes.look(pid)
        # The jobs process has children of its own, which count to it.
        own = [one, *(processes.look(child) for child in processes.children(pid))] if name != "up" else [one]
        living = [each for each in own if each is not None]
        found.append(
            {
                "name": name,
                "pid": pid,
                "started_at": None if one is None else int(one.started_at),
                "memory_bytes": sum(each.memory_bytes for each in living),
                "cpu_s": round(sum(each.cpu_s for each in living), 2),
                "state": "gone" if one is None else "",
            }
        )
    return found


def _state(process: Mapping[str, Any], states: Mapping[str, str]) -> str:
    if process["state"]:
        return str(process["state"])
    kind = str(process["name"]).partition("-")[0]
    return states.get(process["name"], states.get(kind, "runs"))


def _drawn(found: Mapping[str, Any]) -> Iterator[Grid | str]:
    word = "is healthy" if found["healthy"] else "is NOT healthy"
    if found["healthy"] and found["not_looked_at"]:
        word = "is healthy as far as it was looked at"
    yield f"Headgate {found['version']} {word}: {found['url']}, console {found['console']}, state {found['home']}"
    yield ""
    if found["processes"]:
        yield Grid(COLUMNS, [_process_row(one) for one in found["processes"]])
        yield ""
    if found["workers"]:
        yield Grid(("worker", "model", "state", "running", "waiting", "KV used"), _worker_rows(found["workers"]))
        yield ""
    for check in found["checks"]:
        if check.get("message"):
            yield f"{check.get('state', 'ok')}: {check['name']}: {check['message']}"
    yield _books(found["books"]) if found["books"] else _unseen(str(found["not_looked_at"]))


def _process_row(one: Mapping[str, Any]) -> tuple[Any, ...]:
    since = "" if one["started_at"] is None else f"{moment(one['started_at'])} ({ago(one['started_at'])})"
    return one["name"], one["pid"], since, f"{one['memory_bytes'] / 1e6:.0f} MB", f"{one['cpu_s']:.1f} s", one["state"]


def _worker_rows(workers: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (one["id"], one["model"], one["state"], one["running"], one["waiting"], kv_used(one["blocks"]))
        for one in workers
    ]


def kv_used(blocks: Mapping[str, int]) -> str:
    """Returns the share of the KV blocks that running sequences hold."""
    return f"{100 * blocks['held'] / max(1, blocks['total']):.0f} %"


def _failed(books: Mapping[str, Any]) -> list[str]:
    """Names the equations that failed, in what is watched or when all was last verified."""
    watched, verified = books["watched"], books["verified"]
    failed = [] if watched is None else list(watched["failed"])
    return failed + ([] if verified is None else [one["name"] for one in verified["equations"] if not one["ok"]])


def _unseen(why: str) -> str:
    return f"workers and books: NOT looked at. {why}"


def _books(books: Mapping[str, Any]) -> str:
    if failed := _failed(books):
        return f"books: FAILED: {', '.join(failed)}; see `headgate verify-books`"
    watched, verified = books["watched"], books["verified"]
    new = (
        "the first check comes within a minute" if watched is None else f"in order, checked {ago(watched['as_of'])} ago"
    )
    whole = "never, `headgate verify-books` does it" if verified is None else f"{ago(verified['as_of'])} ago, in order"
    return f"books: {new}; the whole ledger: {whole}"


COMMANDS: tuple[click.Command, ...] = (status,)
