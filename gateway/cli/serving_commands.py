"""The rows of the table about what is served and who is notified: `headgate prefixes`, `adapters`, `webhooks`, `workers`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from gateway.cli.admin_commands import Fields, Whole, argument, group, option, row, several
from gateway.cli.answers import Grid, fields, one_sentence, show, warn
from gateway.cli.api import AdminApi, segment
from gateway.cli.common import example_text, fail, home_option, json_option
from gateway.cli.input_files import text_of
from gateway.cli.upstream_commands import UPSTREAMS

WEBHOOKS_PATH = "/admin/v1/webhooks"
WAIT_S, LOOK_S = 15.0, 0.3


def _prefix(given: Fields) -> Fields:
    system, file, text = (given.pop(name) for name in ("system", "system_file", "text"))
    if sum(one is not None for one in (system, file, text)) != 1:
        raise click.UsageError("Give one of --system, --system-file and --text.")
    if text is not None:
        return {**given, "text": text}
    content = text_of(file, "--system-file") if system is None else system
    return {**given, "messages": [{"role": "system", "content": content}]}


PREFIXES = group(
    "prefixes",
    "Publish system prompts: each worker computes them once, and every tenant finds them in the cache.",
    row(
        "add MODEL",
        "Publish a prompt of MODEL. Publish only what every tenant may know: a request that begins with it is cheaper.",
        "POST /admin/v1/prefixes",
        option("--system", help="Text of a system message."),
        option(
            "--system-file",
            type=click.File(encoding="utf-8"),
            help="File with the text of a system message; - reads standard input.",
        ),
        option("--text", help="Start of a prompt for /v1/completions instead."),
        option("--name", default="Public prefix", help="Name of the prompt in lists."),
        option("--ttl-s", type=Whole(1), help="Seconds until it is private again.  [default: never]"),
        shows="id",
        reads=_prefix,
        example="prefixes add my-model --system-file prompt.txt",
    ),
    row(
        "list",
        "List prefixes, the newest first. The state `pinned` means that every worker has it.",
        "GET /admin/v1/prefixes",
        shows=("id", "name", "model", "num_tokens", "state", "expires_at"),
    ),
    row(
        "remove PREFIX_ID",
        "Remove the prefix PREFIX_ID. From the next request on it is private text like any other.",
        "DELETE /admin/v1/prefixes/{prefix_id}",
        shows="id",
    ),
)


def _adapter(given: Fields) -> Fields:
    return {**given, "path": str(given["path"].absolute())}


ADAPTERS = group(
    "adapters",
    "Serve LoRA adapters of a model, as MODEL:NAME.",
    row(
        "add MODEL NAME PATH",
        "Load the adapter in PATH for MODEL. PATH is a directory in PEFT's format on the workers' machines.",
        "POST /admin/v1/adapters",
        argument("path", type=click.Path(path_type=Path)),
        option("--tenant", help="Id or name of the one tenant that sees it.  [default: every tenant]"),
        shows="id",
        reads=_adapter,
        tenant_field="tenant",
        example="adapters add my-model support /models/adapters/support --tenant acme",
    ),
    row(
        "list",
        "List adapters, the newest first. The state `loaded` means that every worker of the model has it.",
        "GET /admin/v1/adapters",
        shows=("id", "served_as", "state", "tenant", "path"),
    ),
    row(
        "remove ADAPTER_ID",
        "Remove the adapter ADAPTER_ID. Requests that run with it end first.",
        "DELETE /admin/v1/adapters/{adapter_id}",
        shows="id",
    ),
)


def _secret(made: dict[str, Any]) -> Grid:
    return fields({name: made[name] for name in ("id", "secret")})


def _webhooks(found: list[dict[str, Any]]) -> Grid:
    columns = ("id", "url", "tenant", "events", "pending", "delivered", "dead", "last error")
    return Grid(columns, [_webhook_row(one) for one in found])


def _webhook_row(one: dict[str, Any]) -> tuple[Any, ...]:
    counts = one["deliveries"]
    types = "all" if one["events"] is None else " ".join(one["events"])
    error = "too many wait: nothing new is noted" if one["full"] else one["last_error"]
    states = (counts[state] for state in ("pending", "delivered", "dead"))
    return one["id"], one["url"], one["tenant"], types, *states, error


@click.command("test", epilog=example_text("webhooks test webhook_0123"))
@click.argument("webhook_id")
@home_option
@json_option
def _test_webhook(webhook_id: str, home: Path, as_json: bool) -> None:
    """Send a test event to the webhook WEBHOOK_ID and wait for the receiver's answer."""
    with one_sentence():
        api = AdminApi(home)
        event_id = api.call("POST", f"{WEBHOOKS_PATH}/{segment(webhook_id)}/test")["id"]
        tried = _outcome(api, webhook_id, event_id)
    if as_json or tried["state"] == "delivered":
        show({name: tried[name] for name in ("id", "state", "attempts", "last_error")}, fields, as_json)
    if tried["state"] != "delivered":
        fail(f"The test has not come through: {tried['last_error'] or 'nobody has tried yet'}.")


def _outcome(api: AdminApi, webhook_id: str, event_id: str) -> dict[str, Any]:
    """Returns the event after its first try, or its current state if that takes too long."""
    deadline = time.monotonic() + WAIT_S
    while True:
        page = api.call("GET", f"{WEBHOOKS_PATH}/{webhook_id}/deliveries", params={"event_id": event_id})
        found: dict[str, Any] = page["data"][0]
        if found["state"] != "pending" or found["last_error"] or time.monotonic() > deadline:
            return found
        time.sleep(LOOK_S)


WEBHOOKS = group(
    "webhooks",
    "Tell other programs of budget alerts, usage, invoices, keys and batches, by signed POSTs.",
    row(
        "add URL",
        "Send events to URL. The secret that signs them is shown now and never again.",
        f"POST {WEBHOOKS_PATH}",
        several("--event", "events", help="A type of event that is sent", default="all types"),
        option("--tenant", help="Id or name of the one tenant whose events are sent.  [default: every tenant]"),
        shows=_secret,
        example="webhooks add https://example.com/hooks --event headgate.budget.alert.v1",
    ),
    row(
        "list",
        "List webhooks, the newest first, with their numbers of pending, delivered and dead events.",
        f"GET {WEBHOOKS_PATH}",
        shows=_webhooks,
    ),
    row(
        "deliveries WEBHOOK_ID",
        "List the latest events for the webhook WEBHOOK_ID and their results.",
        f"GET {WEBHOOKS_PATH}/{{webhook_id}}/deliveries",
        option(
            "--state",
            type=click.Choice(["pending", "delivered", "dead"]),
            help="The one state that is listed.  [default: all]",
        ),
        shows=("id", "type", "state", "attempts", "last_error"),
        example="webhooks deliveries webhook_0123 --state dead",
    ),
    row(
        "remove WEBHOOK_ID",
        "Remove the webhook WEBHOOK_ID. Nothing more is sent to it, and its pending events are dropped.",
        f"DELETE {WEBHOOKS_PATH}/{{webhook_id}}",
        shows="id",
    ),
    _test_webhook,
)


def _workers(api: AdminApi, _: Fields) -> list[dict[str, Any]]:
    """Returns the linked workers, and says of the others why the gateway has no link to them."""
    page = api.call("GET", "/admin/v1/workers")
    for one in page["unreachable"]:
        why = one["refused"] or "it starts, it is gone, or the network is cut"
        warn(f"{one['id']} of {one['model']} is registered at {one['address']} and has no link: {why}.")
    found: list[dict[str, Any]] = page["data"]
    return found


def _drained(made: dict[str, Any]) -> str:
    running = "1 request runs" if made["running"] == 1 else f"{made['running']} requests run"
    return f"{made['id']} takes nothing new; {running} on it."


def _last_one(made: dict[str, Any]) -> str | None:
    if made["num_others_ready"]:
        return None
    return (
        f"No other worker of {made['model']} is ready, so nobody answers requests for it;"
        f" `headgate workers resume {made['id']}` takes the drain back."
    )


WORKERS = group(
    "workers",
    "See the workers that are linked with the gateway, drain one, and take that back.",
    row(
        "list",
        "List the linked workers. The state is `ready`, `draining`, `disk_full`, `silent` or `other_tokenizer`. Of one that is"
        " registered and has no link, a warning says why.",
        _workers,
        shows=("id", "state", "model", "running", "waiting", "predicted_wait_ms", "last_step_age_ms", "address"),
    ),
    row(
        "drain WORKER_ID",
        "Let the worker WORKER_ID finish what runs and take nothing new, until `headgate workers resume`.",
        "POST /admin/v1/workers/{worker_id}/drain",
        shows=_drained,
        warns=lambda _, made: _last_one(made),
        confirm="The worker takes nothing new until it is resumed, or its process is started again. Go on?",
        example="workers drain worker-0",
    ),
    row(
        "resume WORKER_ID",
        "Take the drain of the worker WORKER_ID back: it takes requests again, unless its process was told to end.",
        "POST /admin/v1/workers/{worker_id}/resume",
        shows="id",
        example="workers resume worker-0",
    ),
)


COMMANDS: tuple[click.Command, ...] = (PREFIXES, ADAPTERS, WEBHOOKS, WORKERS, UPSTREAMS)
