"""`headgate keys`: API keys. The command uses the same HTTP API as any program of the operator.

There is one exception, for an operator without an admin key: `keys create --admin` writes to SQL with the home's
pepper.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from accounting.access import api_keys
from accounting.database.auth_epoch import CLI
from accounting.database.db import Database
from accounting.values.types import OPERATOR_TENANT, NewApiKey
from gateway.base.home import Home
from gateway.cli.admin import OrNone, body_of, one_sentence, show, show_fields, table
from gateway.cli.api import PROJECTS, AdminApi, ApiFailed
from gateway.cli.books_access import with_books
from gateway.cli.common import end_streams_option, home_option, json_option, revoking
from gateway.cli.groups import Commands

KEYS = "/admin/v1/keys"
ACCOUNT = "command line"
"""The name of the service account that owns the keys made here."""

model_option = click.option("--model", "models", multiple=True, help="May use this model only; may be repeated.")
address_option = click.option(
    "--address", "addresses", multiple=True, help="May be used from this address or network only; may be repeated."
)


@click.group(cls=Commands)
def keys() -> None:
    """Create, show, change, rotate and revoke API keys."""


@keys.command("create")
@click.argument("tenant", required=False)
@click.option("--name", default="Secret Key", show_default=True)
@click.option("--scope", "scopes", multiple=True, help="May be repeated.  [default: all tenant scopes]")
@click.option("--expires-in-s", type=click.IntRange(min=1), help="Seconds from now.  [default: never]")
@model_option
@address_option
@click.option("--admin", is_flag=True, help="An operator's key, written straight to the database.")
@home_option
@json_option
def create_key(
    tenant: str | None,
    name: str,
    scopes: tuple[str, ...],
    expires_in_s: int | None,
    models: tuple[str, ...],
    addresses: tuple[str, ...],
    admin: bool,
    home: Path,
    as_json: bool,
) -> None:
    """Make a key for TENANT (id or name). Its value is shown this once."""
    if admin == (tenant is not None):
        raise click.UsageError("Give either a tenant or --admin.")
    with one_sentence():
        if tenant is None:
            show(_create_admin_key(Home(home.resolve()), name, expires_in_s), as_json, "value")
            return
        api = AdminApi.of(home)
        accounts = f"{PROJECTS}/{api.project(tenant)['id']}/service_accounts"
        wanted = {"name": name, "scopes": list(scopes), "expires_in_seconds": expires_in_s}
        made = api.call("POST", f"{accounts}/{_account(api, accounts)}/api_keys", wanted)
        if models or addresses:
            _bind(api, made["id"], models, addresses)
        show(made, as_json, "value")


def _account(api: AdminApi, accounts: str) -> str:
    """Returns the id of the service account that owns keys made here."""
    mine = next((a for a in api.every(accounts) if a["name"] == ACCOUNT), None)
    if mine is None:
        mine = api.call("POST", accounts, {"name": ACCOUNT, "create_service_account_only": True})
    return str(mine["id"])


def _bind(api: AdminApi, key_id: str, models: tuple[str, ...], addresses: tuple[str, ...]) -> None:
    """Restricts a new key. If the restriction is refused, the key is disabled, which hurts nobody: its value has not
    been shown yet.
    """
    body = {name: list(value) for name, value in (("models", models), ("addresses", addresses)) if value}
    path = f"{KEYS}/{key_id}"
    try:
        api.call("PATCH", path, body)
    except ApiFailed:
        api.call("PATCH", path, {"disabled": True})
        raise


@keys.command("list")
@click.argument("tenant")
@home_option
@json_option
def list_keys(tenant: str, home: Path, as_json: bool) -> None:
    """List the keys of TENANT (id or name), redacted."""
    with one_sentence():
        api = AdminApi.of(home)
        found = api.every(f"{PROJECTS}/{api.project(tenant)['id']}/api_keys")
        table(found, as_json, ("id", "name", "redacted_value", "created_at", "last_used_at", "expires_at"))


@keys.command("show")
@click.argument("key_id")
@home_option
@json_option
def show_key(key_id: str, home: Path, as_json: bool) -> None:
    """Show everything about a key but its value."""
    with one_sentence():
        show_fields(AdminApi.of(home).call("GET", f"{KEYS}/{key_id}"), as_json)


@keys.command("set")
@click.argument("key_id")
@model_option
@address_option
@click.option("--any-model", is_flag=True, help="Every model that its tenant may use.")
@click.option("--any-address", is_flag=True, help="From wherever it is used.")
@click.option("--disable/--enable", "disabled", default=None, help="A disabled key gets 401.")
@click.option("--requests-per-minute", "max_requests_per_1_minute", type=OrNone(min=0))
@click.option("--tokens-per-minute", "max_tokens_per_1_minute", type=OrNone(min=0))
@click.option("--running", "max_running_requests", type=OrNone(min=0), help="At one time.")
@end_streams_option
@home_option
@json_option
def set_key(
    key_id: str,
    models: tuple[str, ...],
    addresses: tuple[str, ...],
    any_model: bool,
    any_address: bool,
    end_streams: bool | None,
    home: Path,
    as_json: bool,
    **given: Any,
) -> None:
    """Change what is given; the rest stays. A limit of `none` is no limit."""
    if (models and any_model) or (addresses and any_address):
        raise click.UsageError("Give a list or --any-..., not both.")
    given["models"] = "none" if any_model else models
    given["addresses"] = "none" if any_address else addresses
    body = body_of(given)
    with one_sentence():
        changed = AdminApi.of(home).call("PATCH", f"{KEYS}/{key_id}", body, revoking(end_streams))
        show_fields(changed, as_json)


@keys.command("rotate")
@click.argument("key_id")
@click.option(
    "--overlap-s",
    default=0,
    show_default=True,
    type=click.IntRange(0, 604_800),
    help="The old value works for so long; 7 days at most.",
)
@home_option
@json_option
def rotate_key(key_id: str, overlap_s: int, home: Path, as_json: bool) -> None:
    """Give the same key a new value, shown this once. An older value that still overlapped ends now."""
    with one_sentence():
        body = {"overlap_seconds": overlap_s}
        show(AdminApi.of(home).call("POST", f"{KEYS}/{key_id}/rotate", body), as_json, "value")


@keys.command("revoke")
@click.argument("tenant")
@click.argument("key_id")
@end_streams_option
@home_option
@json_option
def revoke_key(tenant: str, key_id: str, end_streams: bool | None, home: Path, as_json: bool) -> None:
    """Revoke a key: it is refused everywhere within 5 seconds, and its running requests end."""
    with one_sentence():
        api = AdminApi.of(home)
        path = f"{PROJECTS}/{api.project(tenant)['id']}/api_keys/{key_id}"
        show(api.call("DELETE", path, params=revoking(end_streams)), as_json, "id")


@keys.command("report-leaked")
@home_option
@json_option
def report_leaked(home: Path, as_json: bool) -> None:
    """Revoke a key by its value, read from standard input, and end its running requests."""
    value = sys.stdin.readline().strip()
    with one_sentence():
        answer = AdminApi.of(home).call("POST", "/admin/v1/leaked-keys", {"value": value})
        show(answer, as_json, "received")


def _create_admin_key(home: Home, name: str, expires_in_s: int | None) -> dict[str, Any]:
    now = int(time.time())

    async def make(database: Database) -> NewApiKey:
        async with database.write() as conn:
            return await api_keys.create(
                conn,
                home.read_secret("pepper"),
                tenant_id=OPERATOR_TENANT,
                kind="admin",
                now=now,
                name=name,
                actor=CLI,
                expires_at=None if expires_in_s is None else now + expires_in_s,
            )

    key = with_books(home.root, make)
    return {"id": key.info.id, "name": name, "value": key.value, "expires_at": key.info.expires_at}


COMMANDS: tuple[click.Command, ...] = (keys,)
