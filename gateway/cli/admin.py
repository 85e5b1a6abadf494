"""`headgate tenants`, `keys`, `usage`, `costs`: administration over HTTP, as any operator's program would do it.

One exception, the way in when no admin key is left: `keys create --admin` writes to SQL with the home's pepper.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from accounting import api_keys
from accounting.db import Database
from accounting.errors import AccountingError
from accounting.types import OPERATOR_TENANT
from gateway.cli.api import PROJECTS, AdminApi, ApiFailed
from gateway.cli.common import fail, home_option, json_option
from gateway.cli.home import Home, HomeError

TENANTS = "/admin/v1/tenants"
ACCOUNT = "command line"
"""The service account that owns the keys made here."""


@contextmanager
def one_sentence() -> Iterator[None]:
    try:
        yield
    except (ApiFailed, AccountingError, HomeError) as error:
        fail(str(error))


@click.group()
def tenants() -> None:
    """Create, list, change and archive tenants."""


@tenants.command("create")
@click.argument("name")
@home_option
@json_option
def create_tenant(name: str, home: Path, as_json: bool) -> None:
    """Make a tenant; `headgate keys create` then makes its key."""
    with one_sentence():
        show(AdminApi.of(home).call("POST", PROJECTS, {"name": name}), as_json, "id")


@tenants.command("list")
@click.option("--all", "everything", is_flag=True, help="Archived ones too.")
@home_option
@json_option
def list_tenants(everything: bool, home: Path, as_json: bool) -> None:
    """Newest first."""
    with one_sentence():
        found = AdminApi.of(home).every(PROJECTS, {"include_archived": str(everything).lower()})
        table(found, as_json, ("id", "name", "status", "created_at"))


@tenants.command("rename")
@click.argument("tenant")
@click.argument("name")
@home_option
@json_option
def rename_tenant(tenant: str, name: str, home: Path, as_json: bool) -> None:
    """TENANT is an id or a name."""
    with one_sentence():
        api = AdminApi.of(home)
        project = api.project(tenant)
        show(api.call("POST", f"{PROJECTS}/{project['id']}", {"name": name}), as_json, "name")


@tenants.command("archive")
@click.argument("tenant")
@home_option
@json_option
@click.confirmation_option(prompt="Archiving is final: its keys are refused from now on. Go on?")
def archive_tenant(tenant: str, home: Path, as_json: bool) -> None:
    """Final. The books remain."""
    with one_sentence():
        api = AdminApi.of(home)
        project = api.project(tenant)
        show(api.call("POST", f"{PROJECTS}/{project['id']}/archive"), as_json, "status")


class OrNone(click.IntRange):
    """A number, or `none` for the default."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value == "none" else super().convert(value, param, ctx)


@tenants.command("set")
@click.argument("tenant")
@click.option("--weight", type=float, help="Share of a busy worker, against others' 1.")
@click.option(
    "--cache-quota-blocks", type=OrNone(min=0), help="Most blocks in a worker's cache, or none."
)
@click.option(
    "--cache-floor-blocks", type=OrNone(min=0), help="Blocks there that no other tenant takes."
)
@click.option(
    "--cache-ttl-s", type=OrNone(min=1), help="Prompts stay for so long after each use, or none."
)
@click.option(
    "--cache-read/--no-cache-read", default=None, help="Prompts may be taken from the cache."
)
@click.option(
    "--cache-write/--no-cache-write", default=None, help="Prompts may be left in the cache."
)
@home_option
@json_option
def set_tenant(tenant: str, home: Path, as_json: bool, **given: Any) -> None:
    """What TENANT (id or name) gets of each worker; what is not given stays."""
    body = {
        name: None if value == "none" else value
        for name, value in given.items()
        if value is not None
    }
    if not body:
        raise click.UsageError("Give at least one option.")
    with one_sentence():
        api = AdminApi.of(home)
        changed = api.call("PATCH", f"{TENANTS}/{api.project(tenant)['id']}", body)
        columns = (
            "weight",
            "cache_quota_blocks",
            "cache_floor_blocks",
            "cache_ttl_s",
            "cache_read",
            "cache_write",
        )
        print_rows(changed, as_json, columns, [tuple(changed[name] for name in columns)])


@tenants.command("purge-cache")
@click.argument("tenant")
@home_option
@json_option
def purge_cache(tenant: str, home: Path, as_json: bool) -> None:
    """Every linked worker forgets what TENANT (id or name) left in its cache. Prints how many were told."""
    with one_sentence():
        api = AdminApi.of(home)
        path = f"{TENANTS}/{api.project(tenant)['id']}/purge-cache"
        show(api.call("POST", path), as_json, "num_workers")


@click.group()
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command("create")
@click.argument("tenant", required=False)
@click.option("--name", default="Secret Key", show_default=True)
@click.option(
    "--scope", "scopes", multiple=True, help="May be repeated.  [default: all tenant scopes]"
)
@click.option(
    "--expires-in-s", type=click.IntRange(min=1), help="Seconds from now.  [default: never]"
)
@click.option("--admin", is_flag=True, help="An operator's key, written straight to the database.")
@home_option
@json_option
def create_key(
    tenant: str | None, name: str, scopes: tuple[str, ...], expires_in_s: int | None, admin: bool,
    home: Path, as_json: bool,
) -> None:  # fmt: skip
    """A key for TENANT (id or name). Its value is shown this once."""
    if admin == (tenant is not None):
        raise click.UsageError("Give either a tenant or --admin.")
    with one_sentence():
        if tenant is None:
            show(
                asyncio.run(_create_admin_key(Home(home.resolve()), name, expires_in_s)),
                as_json,
                "value",
            )
            return
        api = AdminApi.of(home)
        accounts = f"{PROJECTS}/{api.project(tenant)['id']}/service_accounts"
        mine = next((a for a in api.every(accounts) if a["name"] == ACCOUNT), None)
        if mine is None:
            mine = api.call(
                "POST", accounts, {"name": ACCOUNT, "create_service_account_only": True}
            )
        wanted = {"name": name, "scopes": list(scopes), "expires_in_seconds": expires_in_s}
        show(api.call("POST", f"{accounts}/{mine['id']}/api_keys", wanted), as_json, "value")


@keys.command("list")
@click.argument("tenant")
@home_option
@json_option
def list_keys(tenant: str, home: Path, as_json: bool) -> None:
    """Keys of TENANT (id or name), redacted."""
    with one_sentence():
        api = AdminApi.of(home)
        found = api.every(f"{PROJECTS}/{api.project(tenant)['id']}/api_keys")
        table(
            found,
            as_json,
            ("id", "name", "redacted_value", "created_at", "last_used_at", "expires_at"),
        )


@keys.command("revoke")
@click.argument("tenant")
@click.argument("key_id")
@home_option
@json_option
def revoke_key(tenant: str, key_id: str, home: Path, as_json: bool) -> None:
    """Refused everywhere within 5 seconds."""
    with one_sentence():
        api = AdminApi.of(home)
        path = f"{PROJECTS}/{api.project(tenant)['id']}/api_keys/{key_id}"
        show(api.call("DELETE", path), as_json, "id")


@click.command()
@click.option(
    "--days", default=7, show_default=True, type=click.IntRange(1, 31), help="Up to now, UTC."
)
@click.option("--tenant", help="Id or name.  [default: all]")
@home_option
@json_option
def usage(days: int, tenant: str | None, home: Path, as_json: bool) -> None:
    """Tokens by day, tenant and model."""
    columns = ("day", "tenant", "model", "requests", "input", "cached", "output")
    with one_sentence():
        api = AdminApi.of(home)
        page = _report(api, "usage/completions", days, tenant, ["project_id", "model"])
        names = _names(api)
        rows = [
            (_day(bucket), names.get(r["project_id"], r["project_id"]), r["model"], r["num_model_requests"],
             r["input_tokens"], r["input_cached_tokens"], r["output_tokens"])
            for bucket in page["data"] for r in bucket["results"]
        ]  # fmt: skip
        print_rows(page, as_json, columns, rows)


@click.command()
@click.option(
    "--days", default=7, show_default=True, type=click.IntRange(1, 180), help="Up to now, UTC."
)
@click.option("--tenant", help="Id or name.  [default: all]")
@home_option
@json_option
def costs(days: int, tenant: str | None, home: Path, as_json: bool) -> None:
    """Charges by day, tenant and line item."""
    with one_sentence():
        api = AdminApi.of(home)
        page = _report(api, "costs", days, tenant, ["project_id", "line_item"])
        names = _names(api)
        rows = [
            (_day(bucket), names.get(r["project_id"], r["project_id"]), r["line_item"], r["quantity"],
             f"{r['amount']['value']:f} {r['amount']['currency']}")
            for bucket in page["data"] for r in bucket["results"]
        ]  # fmt: skip
        print_rows(page, as_json, ("day", "tenant", "line item", "tokens", "amount"), rows)


def _report(
    api: AdminApi, name: str, days: int, tenant: str | None, groups: list[str]
) -> dict[str, Any]:
    now = int(time.time())
    start = now - now % 86_400 - (days - 1) * 86_400
    params: dict[str, Any] = {"start_time": start, "limit": days, "group_by[]": groups}
    if tenant is not None:
        params["project_ids[]"] = api.project(tenant)["id"]
    return api.call("GET", f"/v1/organization/{name}", params=params)


def _names(api: AdminApi) -> dict[str, str]:
    return {p["id"]: p["name"] for p in api.every(PROJECTS, {"include_archived": "true"})}


def _day(bucket: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(bucket["start_time"]))


async def _create_admin_key(home: Home, name: str, expires_in_s: int | None) -> dict[str, Any]:
    database = Database(os.environ.get("HEADGATE_DATABASE_URL") or home.database_url)
    now = int(time.time())
    try:
        async with database.write() as conn:
            key = await api_keys.create(
                conn, home.read_secret("pepper"), tenant_id=OPERATOR_TENANT, kind="admin", now=now, name=name,
                expires_at=None if expires_in_s is None else now + expires_in_s,
            )  # fmt: skip
    finally:
        await database.close()
    return {"id": key.info.id, "name": name, "value": key.value, "expires_at": key.info.expires_at}


def show(value: dict[str, Any], as_json: bool, field: str) -> None:
    """The one field that matters, for `$(headgate ...)`; or everything."""
    click.echo(msgspec.json.encode(value) if as_json else value[field])


def table(objects: Sequence[dict[str, Any]], as_json: bool, columns: Sequence[str]) -> None:
    print_rows(
        list(objects), as_json, columns, [tuple(o[name] for name in columns) for o in objects]
    )


def print_rows(
    value: Any, as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    if as_json:
        click.echo(msgspec.json.encode(value))
        return
    drawn = Table(box=None, pad_edge=False)
    for name in columns:
        drawn.add_column(name, overflow="fold")
    for row in rows:
        drawn.add_row(*("" if cell is None else str(cell) for cell in row))
    # Never cut: what is piped into a file or another program must be whole.
    console = Console()
    if not console.is_terminal:
        console = Console(width=250)
    console.print(drawn)


COMMANDS: tuple[click.Command, ...] = (tenants, keys, usage, costs)
