"""`headgate budgets`: the spending limits of tenants and keys. The command uses the same HTTP API as any program of the
operator.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from gateway.cli.admin import one_sentence, show, table
from gateway.cli.api import AdminApi
from gateway.cli.common import home_option, json_option
from gateway.cli.groups import Commands
from gateway.cli.money import Amount, shown
from gateway.cli.times import MOMENT

PATH = "/admin/v1/budgets"
COLUMNS = ("id", "project_id", "scope", "period", "limit", "settled", "kind", "ends")

limit_option = click.option("--limit", "limit", type=Amount(), help="Of the tenant's currency, like 25.00.")
kind_option = click.option(
    "--kind",
    type=click.Choice(["hard", "soft", "shadow"]),
    help="hard refuses and stops; soft only alerts; shadow also counts what it would have refused.",
)


@click.group(cls=Commands)
def budgets() -> None:
    """Limit what tenants and keys may spend. Money is reserved token by token, so that no budget is exceeded."""


@budgets.command("add")
@click.argument("tenant")
@limit_option
@click.option("--period", type=click.Choice(["hour", "day", "month"]), help="In UTC.")
@click.option("--from", "start", type=MOMENT, help="Of a fixed period; whole minutes.")
@click.option("--to", "end", type=MOMENT, help="Its end, not included.")
@click.option("--key", help="Id of the one key it binds.  [default: the whole tenant]")
@click.option("--model", help="The one model it binds.")
@click.option("--tier", help="The one tier it binds: interactive or batch.")
@kind_option
@home_option
@json_option
def add(
    tenant: str,
    limit: int | None,
    period: str | None,
    start: int | None,
    end: int | None,
    key: str | None,
    model: str | None,
    tier: str | None,
    kind: str | None,
    home: Path,
    as_json: bool,
) -> None:
    """Give TENANT (an id or a name) a budget. A tenant may have several; a request needs money in all of them."""
    if limit is None:
        raise click.UsageError("Give a --limit.")
    if (period is None) == (start is None) or (start is None) != (end is None):
        raise click.UsageError("Give either --period, or --from and --to.")
    with one_sentence():
        api = AdminApi.of(home)
        body = {
            "project_id": api.project(tenant)["id"],
            "limit_micro_units": limit,
            "api_key_id": key,
            "period": period or {"start": start, "end": end},
            "model": model,
            "tier": tier,
            **_kind(kind),
        }
        show(api.call("POST", PATH, body), as_json, "id")


@budgets.command("list")
@click.option("--tenant", help="Id or name of the one tenant.")
@home_option
@json_option
def list_budgets(tenant: str | None, home: Path, as_json: bool) -> None:
    """List budgets, the newest first, with the settled amount of the current period."""
    with one_sentence():
        api = AdminApi.of(home)
        params = {} if tenant is None else {"project_id": api.project(tenant)["id"]}
        found = api.every(PATH, params)
        table(found if as_json else [_row(one) for one in found], as_json, COLUMNS)


@budgets.command("set")
@click.argument("budget_id")
@limit_option
@kind_option
@home_option
@json_option
def change(budget_id: str, limit: int | None, kind: str | None, home: Path, as_json: bool) -> None:
    """Change limit or kind; the change holds within seconds, for running requests too."""
    if limit is None and kind is None:
        raise click.UsageError("Give --limit or --kind.")
    with one_sentence():
        body = {"limit_micro_units": limit, **_kind(kind)}
        show(AdminApi.of(home).call("PATCH", f"{PATH}/{budget_id}", body), as_json, "id")


@budgets.command("remove")
@click.argument("budget_id")
@home_option
@json_option
def remove(budget_id: str, home: Path, as_json: bool) -> None:
    """Remove a budget; it binds no request any more."""
    with one_sentence():
        show(AdminApi.of(home).call("DELETE", f"{PATH}/{budget_id}"), as_json, "id")


@budgets.command("adjust", context_settings={"ignore_unknown_options": True})
@click.argument("budget_id")
@click.argument("amount", type=Amount(signed=True))
@click.option("--from", "start", type=MOMENT, help="[default: now]")
@click.option("--to", "end", type=MOMENT, required=True, help="Its end, not included.")
@home_option
@json_option
def adjust(budget_id: str, amount: int, start: int | None, end: int, home: Path, as_json: bool) -> None:
    """Raise the limit by AMOUNT for a time, or lower it by a negative one, like -5.00."""
    with one_sentence():
        begin = int(time.time()) if start is None else start
        body = {"micro_units": amount, "from": begin, "to": end}
        show(AdminApi.of(home).call("POST", f"{PATH}/{budget_id}/adjustments", body), as_json, "id")


def _kind(kind: str | None) -> dict[str, bool]:
    return {} if kind is None else {"hard": kind == "hard", "shadow": kind == "shadow"}


def _row(budget: dict[str, Any]) -> dict[str, Any]:
    current = budget["current"] or {}
    scope = " ".join(str(budget[n]) for n in ("api_key_id", "model", "tier") if budget[n])
    fixed = isinstance(budget["period"], dict)
    currency = budget["currency"]
    return budget | {
        "scope": scope or "tenant",
        "period": "fixed" if fixed else budget["period"],
        "limit": shown(current.get("limit_micro_units", budget["limit_micro_units"]), currency),
        "settled": shown(current.get("settled_micro_units"), currency),
        "kind": "shadow" if budget["shadow"] else "hard" if budget["hard"] else "soft",
        "ends": current.get("end_local"),
    }


COMMANDS: tuple[click.Command, ...] = (budgets,)
