"""`headgate webhooks`: the receivers of events. The command uses the same HTTP API as any program of the operator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from gateway.cli.admin import one_sentence, print_rows, show_fields, table
from gateway.cli.api import AdminApi
from gateway.cli.common import fail, home_option, json_option
from gateway.cli.groups import Commands

PATH = "/admin/v1/webhooks"
WAIT_S, LOOK_S = 15.0, 0.3


@click.group(cls=Commands)
def webhooks() -> None:
    """Tell other programs of budget alerts, usage, invoices, keys and batches, by signed POSTs."""


@webhooks.command("add")
@click.argument("url")
@click.option("--event", "events", multiple=True, help="Only these; may be repeated.  [default: all]")
@click.option("--tenant", help="Id or name: only what happens to this one.  [default: every tenant]")
@home_option
@json_option
def add(url: str, events: tuple[str, ...], tenant: str | None, home: Path, as_json: bool) -> None:
    """Send events to URL. The secret that signs them is shown now and never again."""
    body: dict[str, Any] = {"url": url, "events": list(events) or None}
    with one_sentence():
        api = AdminApi.of(home)
        if tenant is not None:
            body["project_id"] = api.project(tenant)["id"]
        made = api.call("POST", PATH, body)
        shown = made if as_json else {name: made[name] for name in ("id", "secret")}
        show_fields(shown, as_json)


@webhooks.command("list")
@home_option
@json_option
def list_webhooks(home: Path, as_json: bool) -> None:
    """List webhooks, the newest first, with their numbers of pending, delivered and dead events."""
    with one_sentence():
        found = AdminApi.of(home).every(PATH)
        columns = ("id", "url", "tenant", "events", "pending", "delivered", "dead", "last error")
        print_rows(found if as_json else None, as_json, columns, [_row(one) for one in found])


@webhooks.command("deliveries")
@click.argument("webhook_id")
@click.option("--state", type=click.Choice(["pending", "delivered", "dead"]))
@home_option
@json_option
def deliveries(webhook_id: str, state: str | None, home: Path, as_json: bool) -> None:
    """List the latest events for a webhook and their results."""
    params = {} if state is None else {"state": state}
    with one_sentence():
        page = AdminApi.of(home).call("GET", f"{PATH}/{webhook_id}/deliveries", params=params)
        columns = ("id", "type", "state", "attempts", "last_error")
        table(page["data"], as_json, columns)


@webhooks.command("remove")
@click.argument("webhook_id")
@home_option
@json_option
def remove(webhook_id: str, home: Path, as_json: bool) -> None:
    """Remove a webhook: nothing more is sent; pending events are dropped."""
    with one_sentence():
        answer = AdminApi.of(home).call("DELETE", f"{PATH}/{webhook_id}")
        show_fields(answer, as_json) if as_json else click.echo(webhook_id)


@webhooks.command("test")
@click.argument("webhook_id")
@home_option
@json_option
def test(webhook_id: str, home: Path, as_json: bool) -> None:
    """Send a test event and wait for the receiver's answer."""
    with one_sentence():
        api = AdminApi.of(home)
        event_id = api.call("POST", f"{PATH}/{webhook_id}/test")["id"]
        tried = _outcome(api, webhook_id, event_id)
        if as_json or tried["state"] == "delivered":
            show_fields({name: tried[name] for name in ("id", "state", "attempts", "last_error")}, as_json)
        if tried["state"] != "delivered":
            fail(f"The test has not come through: {tried['last_error'] or 'nobody has tried yet'}.")


def _outcome(api: AdminApi, webhook_id: str, event_id: str) -> dict[str, Any]:
    """Returns the event after its first try, or its current state if that takes too long."""
    deadline = time.monotonic() + WAIT_S
    while True:
        page = api.call("GET", f"{PATH}/{webhook_id}/deliveries", params={"event_id": event_id})
        found: dict[str, Any] = page["data"][0]
        if found["state"] != "pending" or found["last_error"] or time.monotonic() > deadline:
            return found
        time.sleep(LOOK_S)


def _row(one: dict[str, Any]) -> tuple[Any, ...]:
    counts = one["deliveries"]
    types = "all" if one["events"] is None else " ".join(one["events"])
    return (
        one["id"],
        one["url"],
        one["project_id"] or "every",
        types,
        counts["pending"],
        counts["delivered"],
        counts["dead"],
        "too many wait: nothing new is noted" if one["full"] else one["last_error"],
    )


COMMANDS: tuple[click.Command, ...] = (webhooks,)
