"""`headgate audit`: the log of all changes and of who made them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.cli.admin import one_sentence, print_rows
from gateway.cli.api import AdminApi
from gateway.cli.common import home_option, json_option
from gateway.cli.groups import Commands

AUDIT_LOGS = "/v1/organization/audit_logs"
PAGE = 100
COLUMNS = ("time (UTC)", "type", "actor", "tenant", "object", "details")


@click.group(cls=Commands)
def audit() -> None:
    """Read the audit log: every change by API or command line, which nobody can edit."""


@audit.command("list")
@click.option("--tenant", help="Id or name.")
@click.option("--type", "types", multiple=True, help="As `api_key.created`; may be repeated.")
@click.option("--actor", "actors", multiple=True, help="A key's id, `cli` or `system`.")
@click.option("--object", "objects", multiple=True, help="Id of what was changed.")
@click.option("--days", type=click.IntRange(min=1), help="Of the last days.  [default: all]")
@click.option("--limit", default=PAGE, show_default=True, type=click.IntRange(min=1))
@home_option
@json_option
def list_entries(
    tenant: str | None,
    types: tuple[str, ...],
    actors: tuple[str, ...],
    objects: tuple[str, ...],
    days: int | None,
    limit: int,
    home: Path,
    as_json: bool,
) -> None:
    """List changes, the newest first."""
    params: dict[str, Any] = {
        "event_types[]": list(types),
        "actor_ids[]": list(actors),
        "resource_ids[]": list(objects),
    }
    if days is not None:
        params["effective_at[gte]"] = int(time.time()) - days * 86_400
    with one_sentence():
        api = AdminApi.of(home)
        if tenant is not None:
            params["project_ids[]"] = api.project(tenant, archived=True)["id"]
        found = _newest(api, params, limit)
        print_rows(found, as_json, COLUMNS, [_row(entry) for entry in found])


def _newest(api: AdminApi, params: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < limit:
        after = {"after": found[-1]["id"]} if found else {}
        size = {"limit": min(PAGE, limit - len(found))}
        page = api.call("GET", AUDIT_LOGS, params={**params, **size, **after})
        found += page["data"]
        if not page["has_more"]:
            break
    return found


def _row(entry: dict[str, Any]) -> tuple[Any, ...]:
    details = dict(entry[entry["type"]])
    target = details.pop("id")
    actor = entry["actor"]
    who = actor["api_key"]["id"] if "api_key" in actor else actor["session"]["user"]["id"]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry["effective_at"]))
    tenant = entry.get("project", {}).get("name")
    text = msgspec.json.encode(details).decode() if details else ""
    return when, entry["type"], who, tenant, target, text


COMMANDS: tuple[click.Command, ...] = (audit,)
