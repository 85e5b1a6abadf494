"""`headgate quotas`: limits per day, for input and output separately, per model and end user. The command uses the same
HTTP API as any program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from accounting.values.budget_types import Dimension, Level
from gateway.cli.admin import OrNone, one_sentence, show_fields, table
from gateway.cli.api import AdminApi
from gateway.cli.common import home_option, json_option
from gateway.cli.groups import Commands

PATH = "/admin/v1/quotas"
COLUMNS = ("level", "subject", "dimension", "limit", "shadow")
MAX_LIMIT = 2**53 - 1


@click.group(cls=Commands)
def quotas() -> None:
    """Set limits in addition to those of `headgate limits`: per day, for input and output separately, per end user."""


@quotas.command("list")
@click.argument("tenant")
@home_option
@json_option
def list_quotas(tenant: str, home: Path, as_json: bool) -> None:
    """List all quotas of TENANT, an id or a name."""
    with one_sentence():
        api = AdminApi.of(home)
        found = api.call("GET", PATH, params={"project_id": api.project(tenant)["id"]})
        table(found["data"], as_json, COLUMNS)


@quotas.command("set")
@click.argument("tenant")
@click.argument("dimension", type=click.Choice(get_args(Dimension)))
@click.argument("limit", type=OrNone(0, MAX_LIMIT))
@click.option(
    "--level",
    type=click.Choice(get_args(Level)),
    default="tenant",
    show_default=True,
    help="Whom it binds: each end user by itself.",
)
@click.option("--subject", default="", help="The id of the key, or the model, that it binds.")
@click.option("--shadow", is_flag=True, help="Only count what it would have refused.")
@home_option
@json_option
def set_quota(
    tenant: str, dimension: str, limit: int | str, level: str, subject: str, shadow: bool, home: Path, as_json: bool
) -> None:
    """Set a LIMIT of TENANT; it replaces the one that binds the same. `none` removes it."""
    if (level in ("key", "model")) != bool(subject):
        raise click.UsageError("A key's or a model's limit names it by --subject; others name nothing.")
    with one_sentence():
        api = AdminApi.of(home)
        body: dict[str, Any] = {
            "project_id": api.project(tenant)["id"],
            "level": level,
            "subject": subject,
            "dimension": dimension,
            "limit": None if limit == "none" else limit,
            "shadow": shadow,
        }
        show_fields(api.call("POST", PATH, body), as_json)


COMMANDS: tuple[click.Command, ...] = (quotas,)
