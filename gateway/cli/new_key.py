"""`headgate keys create`: several calls for a tenant's key. An operator's key is written to SQL with the home's pepper,
for an operator who has no admin key to call with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from accounting.values.tenant_types import NewApiKey
from accounting.values.types import OPERATOR_TENANT
from gateway.base.home import Home
from gateway.cli.admin_commands import Fields
from gateway.cli.api import PROJECTS, AdminApi, ApiFailed

if TYPE_CHECKING:
    from accounting.database.db import Database

ACCOUNT = "command line"
"""The name of the service account that owns the keys made here."""


def owner_is_named(given: Fields) -> Fields:
    """Raises UsageError unless the owner is either a tenant or the operator, and for what the operator's keys lack."""
    if given["admin"] == (given["tenant"] is not None):
        raise click.UsageError("Give either a tenant or --admin.")
    if given["admin"] and (given["models"] or given["addresses"]):
        raise click.UsageError("A key of the operator has no models and no addresses: leave out --model and --address.")
    return given


def create_key(api: AdminApi, fields: Fields) -> dict[str, Any]:
    """Makes the key and returns it with its value. Raises ApiFailed."""
    name, expires_in_s = fields["name"], fields.get("expires_in_seconds")
    if fields["admin"]:
        return _create_admin_key(Home(api.home.resolve()), name, fields.get("scopes", ()), expires_in_s)
    accounts = f"{PROJECTS}/{fields['tenant']}/service_accounts"
    wanted = {"name": name, "scopes": list(fields.get("scopes", ())), "expires_in_seconds": expires_in_s}
    made = api.call("POST", f"{accounts}/{_account(api, accounts)}/api_keys", wanted)
    bounds: dict[str, list[str]] = {name: list(fields[name]) for name in ("models", "addresses") if name in fields}
    if bounds:
        _bind(api, made["id"], bounds)
    return made


def _account(api: AdminApi, accounts: str) -> str:
    """Returns the id of the service account that owns keys made here."""
    mine = next((a for a in api.read(accounts, {}) if a["name"] == ACCOUNT), None)
    if mine is None:
        mine = api.call("POST", accounts, {"name": ACCOUNT, "create_service_account_only": True})
    return str(mine["id"])


def _bind(api: AdminApi, key_id: str, bounds: dict[str, list[str]]) -> None:
    """Restricts a new key. If the restriction is refused, the key is disabled, which hurts nobody: its value has not
    been shown yet.
    """
    path = f"/admin/v1/keys/{key_id}"
    try:
        api.call("PATCH", path, bounds)
    except ApiFailed:
        api.call("PATCH", path, {"disabled": True})
        raise


def _create_admin_key(home: Home, name: str, scopes: Sequence[str], expires_in_s: int | None) -> dict[str, Any]:
    from accounting.access import api_keys
    from accounting.database.auth_epoch import CLI
    from gateway.cli.books_access import with_books

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
                scopes=scopes,
                actor=CLI,
                expires_at=None if expires_in_s is None else now + expires_in_s,
            )

    key = with_books(home.root, make)
    return {"id": key.info.id, "name": name, "value": key.value, "expires_at": key.info.expires_at}
