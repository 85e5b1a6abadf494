"""`headgate limits` and `headgate models-permissions`: the rate limits, spend limits and allowed models of a tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gateway.cli.admin import OrNone, body_of, one_sentence, show_fields, table
from gateway.cli.api import PROJECTS, AdminApi, ApiFailed, NotThere
from gateway.cli.common import home_option, json_option
from gateway.cli.groups import Commands
from gateway.cli.money import Amount, shown

MICRO_UNITS_PER_CENT = 10_000
TENANTS = "/admin/v1/tenants"
COLUMNS = ("model", "max_requests_per_1_minute", "max_tokens_per_1_minute", "batch_1_day_max_input_tokens")


@click.group(cls=Commands)
def limits() -> None:
    """Show and change limits of tenants, by model or over all models, and what they may spend."""


@limits.command("list")
@click.argument("tenant")
@home_option
@json_option
def list_limits(tenant: str, home: Path, as_json: bool) -> None:
    """List the limits of TENANT on each model that has a price. `headgate tenants show` has those over all models."""
    with one_sentence():
        api = AdminApi.of(home)
        path = f"{PROJECTS}/{api.project(tenant)['id']}/rate_limits"
        table(api.every(path), as_json, COLUMNS)


@limits.command("set")
@click.argument("tenant")
@click.option("--model", help="On this model alone.  [default: over all models]")
@click.option("--requests-per-minute", "max_requests_per_1_minute", type=OrNone(min=0))
@click.option("--tokens-per-minute", "max_tokens_per_1_minute", type=OrNone(min=0))
@click.option("--running", "max_running_requests", type=OrNone(min=0), help="Requests at one time; not by model.")
@click.option(
    "--batch-tokens",
    "batch_1_day_max_input_tokens",
    type=click.IntRange(min=0),
    help="Prompt tokens of unfinished batch lines; by model only.",
)
@home_option
@json_option
def set_limits(tenant: str, model: str | None, home: Path, as_json: bool, **given: Any) -> None:
    """Change the limits that are given; the others stay. Over all models, `none` is no limit."""
    body = body_of(given)
    unfit = "max_running_requests" if model else "batch_1_day_max_input_tokens"
    if unfit in body or (model and None in body.values()):
        raise click.UsageError("One of these limits is not for this scope: see --help.")
    with one_sentence():
        api = AdminApi.of(home)
        tenant_id = api.project(tenant)["id"]
        if model is None:
            show_fields(api.call("PATCH", f"{TENANTS}/{tenant_id}", body), as_json)
            return
        path = f"{PROJECTS}/{tenant_id}/rate_limits/rl-{model.replace('/', '%2F')}"
        show_fields(api.call("POST", path, body), as_json)


@limits.command("spend")
@click.argument("tenant", required=False)
@click.option(
    "--limit", "--usd", "limit", type=Amount(places=2), help="Hard limit in USD for each month (UTC), like 25.00."
)
@click.option("--remove", is_flag=True, help="No limit any more.")
@home_option
@json_option
def spend(tenant: str | None, limit: int | None, remove: bool, home: Path, as_json: bool) -> None:
    """Show, set or remove the spend limit of TENANT; without TENANT, of all tenants together."""
    if remove and limit is not None:
        raise click.UsageError("Give --limit or --remove, not both.")
    with one_sentence():
        api = AdminApi.of(home)
        owner = f"{PROJECTS}/{api.project(tenant)['id']}" if tenant else "/v1/organization"
        path = f"{owner}/spend_limit"
        try:
            if limit is not None:
                terms = {"currency": "USD", "interval": "month"}
                found = api.call("POST", path, {"threshold_amount": limit // MICRO_UNITS_PER_CENT, **terms})
            else:
                found = api.call("DELETE" if remove else "GET", path)
        except NotThere:
            raise ApiFailed("No spend limit is set.") from None
        if not as_json and "threshold_amount" in found:
            amount = found["threshold_amount"] * MICRO_UNITS_PER_CENT
            found["threshold_amount"] = shown(amount, found.pop("currency"))
        show_fields(found, as_json)


@click.group("models-permissions", cls=Commands)
def permissions() -> None:
    """Choose the models that all keys of a tenant may use, in addition to each key's own list."""


def _permissions(home: Path, tenant: str) -> tuple[AdminApi, str]:
    api = AdminApi.of(home)
    return api, f"{PROJECTS}/{api.project(tenant)['id']}/model_permissions"


@permissions.command("show")
@click.argument("tenant")
@home_option
@json_option
def show_permissions(tenant: str, home: Path, as_json: bool) -> None:
    """Show the models that TENANT may use, or may not use. A deny list without models denies nothing."""
    with one_sentence():
        api, path = _permissions(home, tenant)
        show_fields(api.call("GET", path), as_json)


def _list_command(name: str, mode: str, summary: str) -> None:
    @permissions.command(name, help=summary)
    @click.argument("tenant")
    @click.argument("models", nargs=-1, required=True)
    @home_option
    @json_option
    def command(tenant: str, models: tuple[str, ...], home: Path, as_json: bool) -> None:
        with one_sentence():
            api, path = _permissions(home, tenant)
            body = {"mode": mode, "model_ids": list(models)}
            show_fields(api.call("POST", path, body), as_json)


_list_command("allow", "allow_list", "TENANT may use these MODELS and no others.")
_list_command("deny", "deny_list", "TENANT may use every model but these MODELS.")


@permissions.command("clear")
@click.argument("tenant")
@home_option
@json_option
def clear(tenant: str, home: Path, as_json: bool) -> None:
    """Allow every model again."""
    with one_sentence():
        api, path = _permissions(home, tenant)
        show_fields(api.call("DELETE", path), as_json)


COMMANDS: tuple[click.Command, ...] = (limits, permissions)
