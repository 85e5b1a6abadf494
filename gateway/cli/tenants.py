"""`headgate tenants`: tenants. The command uses the same HTTP API as any program of the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gateway.cli.admin import OrNone, body_of, one_sentence, print_rows, show, show_fields, table
from gateway.cli.api import PROJECTS, AdminApi, ApiFailed
from gateway.cli.common import end_streams_option, home_option, json_option, revoking
from gateway.cli.groups import Commands

TENANTS = "/admin/v1/tenants"


@click.group(cls=Commands)
def tenants() -> None:
    """Create, show, change, suspend, archive and delete tenants. A tenant is named by its id or its name."""


@tenants.command("create")
@click.argument("name")
@click.option("--if-not-exists", is_flag=True, help="Where a tenant has that name, show that one instead.")
@home_option
@json_option
def create_tenant(name: str, if_not_exists: bool, home: Path, as_json: bool) -> None:
    """Make a tenant; `headgate keys create` then makes its key."""
    with one_sentence():
        api = AdminApi.of(home)
        try:
            made = api.call("POST", PROJECTS, {"name": name})
        except ApiFailed as error:
            if error.code != "name_taken":
                raise
            if not if_not_exists:
                raise ApiFailed(f"A tenant is called {name!r} already; with --if-not-exists its id is shown.") from None
            made = api.project(name)
        show(made, as_json, "id")


@tenants.command("list")
@click.option("--all", "everything", is_flag=True, help="Archived ones too.")
@home_option
@json_option
def list_tenants(everything: bool, home: Path, as_json: bool) -> None:
    """List tenants, the newest first."""
    with one_sentence():
        found = AdminApi.of(home).every(PROJECTS, {"include_archived": str(everything).lower()})
        table(found, as_json, ("id", "name", "status", "created_at"))


@tenants.command("show")
@click.argument("tenant")
@home_option
@json_option
def show_tenant(tenant: str, home: Path, as_json: bool) -> None:
    """Show the limits and settings of TENANT, and its share of each worker."""
    with one_sentence():
        api = AdminApi.of(home)
        show_fields(api.call("GET", f"{TENANTS}/{api.project(tenant)['id']}"), as_json)


@tenants.command("rename")
@click.argument("tenant")
@click.argument("name")
@home_option
@json_option
def rename_tenant(tenant: str, name: str, home: Path, as_json: bool) -> None:
    """Rename TENANT, an id or a name."""
    with one_sentence():
        api = AdminApi.of(home)
        project = api.project(tenant)
        show(api.call("POST", f"{PROJECTS}/{project['id']}", {"name": name}), as_json, "name")


@tenants.command("set")
@click.argument("tenant")
@click.option("--weight", type=float, help="Share of a busy worker, against others' 1.")
@click.option("--time-zone", help="In which invoices and ends of budgets are shown, like Europe/Berlin.")
@click.option("--cache-quota-blocks", type=OrNone(min=0), help="Most blocks in a worker's cache, or none.")
@click.option("--cache-floor-blocks", type=OrNone(min=0), help="Blocks there that no other tenant takes.")
@click.option("--cache-ttl-s", type=OrNone(min=1), help="Prompts stay for so long after each use, or none.")
@click.option("--cache-read/--no-cache-read", default=None, help="Prompts may be taken from the cache.")
@click.option("--cache-write/--no-cache-write", default=None, help="Prompts may be left in the cache.")
@home_option
@json_option
def set_tenant(tenant: str, home: Path, as_json: bool, **given: Any) -> None:
    """Set the share of TENANT (id or name) on each worker, and its time zone; options that are not given stay."""
    body = body_of(given)
    with one_sentence():
        api = AdminApi.of(home)
        changed = api.call("PATCH", f"{TENANTS}/{api.project(tenant)['id']}", body)
        columns = (
            "weight",
            "time_zone",
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
    """Make every linked worker forget the cached prompts of TENANT (id or name). Prints how many workers were told."""
    with one_sentence():
        api = AdminApi.of(home)
        path = f"{TENANTS}/{api.project(tenant)['id']}/purge-cache"
        show(api.call("POST", path), as_json, "num_workers")


@tenants.command("suspend")
@click.argument("tenant")
@end_streams_option
@home_option
@json_option
def suspend(tenant: str, end_streams: bool | None, home: Path, as_json: bool) -> None:
    """Suspend a tenant: its keys get 403 until `headgate tenants resume`, and its running requests end."""
    _suspend(tenant, True, end_streams, home, as_json)


@tenants.command("resume")
@click.argument("tenant")
@home_option
@json_option
def resume(tenant: str, home: Path, as_json: bool) -> None:
    """End a suspension."""
    _suspend(tenant, False, None, home, as_json)


def _suspend(tenant: str, suspended: bool, end_streams: bool | None, home: Path, as_json: bool) -> None:
    with one_sentence():
        api = AdminApi.of(home)
        path = f"{TENANTS}/{api.project(tenant)['id']}"
        body = {"suspended": suspended}
        show(api.call("PATCH", path, body, revoking(end_streams)), as_json, "status")


@tenants.command("archive")
@click.argument("tenant")
@end_streams_option
@home_option
@json_option
@click.confirmation_option(prompt="Archiving is final: its keys are refused from now on. Go on?")
def archive_tenant(tenant: str, end_streams: bool | None, home: Path, as_json: bool) -> None:
    """Archive a tenant for good: keys are refused, running requests end, open batches are cancelled, caches purged. The
    books remain.
    """
    with one_sentence():
        api = AdminApi.of(home)
        path = f"{PROJECTS}/{api.project(tenant)['id']}/archive"
        show(api.call("POST", path, params=revoking(end_streams)), as_json, "status")


@tenants.command("delete")
@click.argument("tenant")
@home_option
@json_option
@click.confirmation_option(prompt="What the tenant stored can never be read again. Go on?")
def delete_tenant(tenant: str, home: Path, as_json: bool) -> None:
    """Destroy the stored data of an archived TENANT: the key of its files and answers, and its names.

    This needs a tenant that was archived for as long as the gateway's HEADGATE_RETENTION_DAYS says (30). The books
    remain, under ids. Prints the report of what was destroyed.
    """
    with one_sentence():
        api = AdminApi.of(home)
        project = api.project(tenant, archived=True)
        show_fields(api.call("DELETE", f"{TENANTS}/{project['id']}"), as_json)


COMMANDS: tuple[click.Command, ...] = (tenants,)
