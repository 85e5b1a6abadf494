"""The rows of the table that limit tenants: `headgate limits`, `models-permissions`, `quotas`, `budgets`."""

from __future__ import annotations

import time
from typing import Any, get_args
from urllib.parse import quote

import click

from accounting.values.budget_types import Dimension, Level
from accounting.values.types import Tier
from gateway.cli.admin_commands import (
    ONE_TENANT,
    REQUEST_LIMITS,
    Fields,
    OrNone,
    Whole,
    argument,
    group,
    idempotency_key,
    option,
    row,
)
from gateway.cli.answers import Grid, fields
from gateway.cli.api import PROJECTS, AdminApi, ApiFailed, NotThere
from gateway.cli.money import Amount, cost, shown
from gateway.cli.times import MOMENT
from gateway.schema.money import decimal

MAX_LIMIT = 2**53 - 1


def _limits_that_fit(given: Fields) -> Fields:
    """Returns the limits that are given; `none` as null. Raises UsageError for one that the scope does not have."""
    scope = {name: given.pop(name) for name in ("tenant", "model")}
    limits = {name: None if value == "none" else value for name, value in given.items() if value is not None}
    if not limits:
        raise click.UsageError("Nothing would change: give at least one limit.")
    unfit = "max_running_requests" if scope["model"] else "batch_1_day_max_input_tokens"
    if unfit in limits or (scope["model"] and None in limits.values()):
        raise click.UsageError(
            "--running and `none` are for all models together, --batch-tokens is for one model: see --help."
        )
    return {**scope, "limits": limits}


def _limits_to_try(given: Fields) -> Fields:
    """Raises UsageError where there is no limit: such a preview would refuse nothing, whatever holds for the tenant."""
    limits = [value for name, value in given.items() if name.startswith(("max_", "limit_"))]
    if all(limit is None for limit in limits):
        raise click.UsageError(
            "There is no limit to try: give --requests-per-minute, another limit or --budget. Those that hold now are shown by"
            " `headgate tenants show`, `headgate limits list`, `headgate quotas list` and `headgate budgets list`."
        )
    return given


def _set_limits(api: AdminApi, fields: Fields) -> dict[str, Any]:
    tenant, model = fields["tenant"], fields.get("model")
    if model is None:
        return api.call("PATCH", f"/admin/v1/tenants/{tenant}", fields["limits"])
    try:
        return api.call("POST", f"{PROJECTS}/{tenant}/rate_limits/rl-{quote(model, safe='')}", fields["limits"])
    except NotThere:
        raise ApiFailed(
            f"There is no limit for the model {model}, which has no price for this tenant: `headgate limits list` shows the"
            " models that have.",
            "not_found",
        ) from None


def _spend_limit_wanted(given: Fields) -> Fields:
    dollars = given.pop("usd")
    if sum((given["remove"], given["limit"] is not None, dollars is not None)) > 1:
        raise click.UsageError("Give --limit, --usd or --remove, one of them.")
    return given if dollars is None else {**given, "limit": dollars, "currency": "USD"}


def _spend_limit(api: AdminApi, fields: Fields) -> dict[str, Any]:
    owner = f"{PROJECTS}/{fields['tenant']}" if "tenant" in fields else "/v1/organization"
    path = f"{owner}/spend_limit"
    try:
        if "limit" not in fields:
            return api.call("DELETE" if fields["remove"] else "GET", path)
        body = {"amount": decimal(fields["limit"]), "currency": fields.get("currency"), "interval": "month"}
        return api.call("POST", path, body)
    except NotThere:
        raise ApiFailed("No spend limit is set.") from None


def _spend_limit_shown(found: dict[str, Any]) -> Grid:
    if "threshold_amount" in found:
        del found["threshold_amount"]
        found["amount"] = f"{found['amount']} {found.pop('currency')}"
    return fields(found)


LIMITS = group(
    "limits",
    "Show and change the limits of tenants, for one model or over all models, and what they may spend.",
    row(
        "list TENANT",
        "List the limits of TENANT on each model that has a price. `headgate tenants show` has those over all models.",
        f"GET {PROJECTS}/{{tenant}}/rate_limits",
        shows=("model", "max_requests_per_1_minute", "max_tokens_per_1_minute", "batch_1_day_max_input_tokens"),
    ),
    row(
        "set TENANT",
        "Change the limits of TENANT that are given; the others stay. Over all models, `none` is no limit.\n\n"
        "--running is a limit over all models only, --batch-tokens a limit of one model only.",
        _set_limits,
        option("--model", help="The one model that is limited.  [default: all models together]"),
        *REQUEST_LIMITS,
        option(
            "--batch-tokens",
            "batch_1_day_max_input_tokens",
            type=Whole(0),
            help="The most prompt tokens in unfinished batch lines.",
        ),
        shows=fields,
        reads=_limits_that_fit,
        example="limits set acme --model my-model --requests-per-minute 60",
    ),
    row(
        "preview TENANT",
        "Say how many requests of the last 7 days such limits would have refused TENANT. Nothing is changed.\n\n"
        "Limits of a minute are tried together, a limit of a day and a budget each alone.",
        "POST /admin/v1/tenants/{tenant}/limits/preview",
        option("--model", help="The one model that is limited.  [default: all models together]"),
        option("--requests-per-minute", "max_requests_per_1_minute", type=Whole(0), help="Requests a minute."),
        option("--tokens-per-minute", "max_tokens_per_1_minute", type=Whole(0), help="Tokens a minute."),
        option(
            "--input-tokens-per-minute", "max_input_tokens_per_1_minute", type=Whole(0), help="Input tokens a minute."
        ),
        option(
            "--output-tokens-per-minute",
            "max_output_tokens_per_1_minute",
            type=Whole(0),
            help="Output tokens a minute.",
        ),
        option("--requests-per-day", "max_requests_per_1_day", type=Whole(0), help="Requests a day."),
        option("--budget", "limit_micro_units", type=Amount(), help="What each --period may cost."),
        option("--period", type=click.Choice(["hour", "day", "month"]), help="The period of --budget, in UTC."),
        option("--tier", type=click.Choice(get_args(Tier)), help="The one tier that --budget binds.  [default: all]"),
        option("--key", "api_key_id", help="The one key that is limited.  [default: all keys together]"),
        shows=fields,
        reads=_limits_to_try,
        example="limits preview acme --requests-per-minute 60",
    ),
    row(
        "spend [TENANT]",
        "Show, set or remove the spend limit of TENANT; without TENANT, of all tenants together.",
        _spend_limit,
        option("--limit", type=Amount(), help="What each month (in UTC) may cost, in the tenant's currency."),
        option("--currency", help="Currency of the limit; another one than the tenant's is refused."),
        option("--usd", type=Amount(places=2), help="The same as --limit with --currency USD."),
        option("--remove", is_flag=True, help="Remove the limit."),
        shows=_spend_limit_shown,
        reads=_spend_limit_wanted,
        example="limits spend acme --limit 25.00",
    ),
)

_PERMISSIONS = f"{PROJECTS}/{{tenant}}/model_permissions"
_MODELS = argument("model_ids", nargs=-1, required=True, metavar="MODELS...")

PERMISSIONS = group(
    "models-permissions",
    "Choose the models that all keys of a tenant may use, in addition to each key's own list.",
    row(
        "show TENANT",
        "Show the models that TENANT may use, or may not use. A deny list without models denies nothing.",
        f"GET {_PERMISSIONS}",
        shows=fields,
    ),
    row(
        "allow TENANT MODELS...",
        "Allow TENANT to use these MODELS and no others.",
        f"POST {_PERMISSIONS}",
        _MODELS,
        fixed={"mode": "allow_list"},
        shows=fields,
        models=lambda sent: sent["model_ids"],
        example="models-permissions allow acme my-model other-model",
    ),
    row(
        "deny TENANT MODELS...",
        "Allow TENANT to use every model but these MODELS.",
        f"POST {_PERMISSIONS}",
        _MODELS,
        fixed={"mode": "deny_list"},
        shows=fields,
        models=lambda sent: sent["model_ids"],
        example="models-permissions deny acme my-model",
    ),
    row("clear TENANT", "Allow TENANT every model again.", f"DELETE {_PERMISSIONS}", shows=fields),
)


def _quota(given: Fields) -> Fields:
    if (given["level"] in ("key", "model")) != bool(given["subject"]):
        raise click.UsageError("The levels key and model need a --subject, and the other levels take none.")
    return {**given, "limit": None if given["limit"] == "none" else given["limit"]}


QUOTAS = group(
    "quotas",
    "Set limits in addition to those of `headgate limits`: per day, for input and output separately, per end user.",
    row(
        "list TENANT",
        "List all quotas of TENANT.",
        "GET /admin/v1/quotas",
        shows=("level", "subject", "dimension", "limit", "shadow"),
    ),
    row(
        "set TENANT DIMENSION LIMIT",
        "Set a LIMIT of TENANT; it replaces the one that binds the same. `none` removes it.",
        "POST /admin/v1/quotas",
        argument("dimension", type=click.Choice(get_args(Dimension))),
        argument("limit", type=OrNone(0, MAX_LIMIT)),
        option(
            "--level",
            type=click.Choice(get_args(Level)),
            default="tenant",
            help="What the limit binds; `end_user` binds each end user by itself.",
        ),
        option("--subject", default="", show_default=False, help="Id of the key, or the model, that it binds."),
        option("--shadow", is_flag=True, help="Count the requests that it would refuse, and refuse none."),
        shows=fields,
        models=lambda sent: [sent["subject"]] if sent["level"] == "model" else [],
        reads=_quota,
        example="quotas set acme requests_per_day 5000 --level end_user",
    ),
)


def _budget(given: Fields) -> Fields:
    period, start, end = (given.pop(name) for name in ("period", "start", "end"))
    if (period is None) == (start is None) or (start is None) != (end is None):
        raise click.UsageError("Give either --period, or --from and --to.")
    return {**_hardness(given), "period": period or {"start": start, "end": end}}


def _hardness(given: Fields) -> Fields:
    kind = given.pop("kind")
    return given if kind is None else {**given, "hard": kind == "hard", "shadow": kind == "shadow"}


def _budgets(found: list[dict[str, Any]]) -> Grid:
    columns = ("id", "tenant", "scope", "period", "limit", "settled", "kind", "ends")
    return Grid(columns, [_budget_row(budget) for budget in found])


def _budget_row(budget: dict[str, Any]) -> tuple[Any, ...]:
    current = budget["current"] or {}
    scope = " ".join(str(budget[name]) for name in ("api_key_id", "model", "tier") if budget[name])
    currency = budget["currency"]
    return (
        budget["id"],
        budget["tenant"],
        scope or "tenant",
        "fixed" if isinstance(budget["period"], dict) else budget["period"],
        shown(current.get("limit_micro_units", budget["limit_micro_units"]), currency),
        cost(current.get("settled_micro_units"), currency),
        "shadow" if budget["shadow"] else "hard" if budget["hard"] else "soft",
        str(current.get("end_local") or "").replace("T", " ").removesuffix("+00:00"),
    )


_LIMIT = ("--limit", "limit_micro_units")
_LIMIT_HELP = "Amount in the tenant's currency, such as 25.00."
_KIND = option(
    "--kind",
    type=click.Choice(["hard", "soft", "shadow"]),
    help="A hard budget refuses and stops requests, a soft one only alerts, a shadow also counts what it would have"
    " refused.  [default: hard]",
)

BUDGETS = group(
    "budgets",
    "Limit what tenants and keys may spend. Money is reserved token by token, so that no budget is exceeded.",
    row(
        "add TENANT",
        "Give TENANT a budget. A tenant may have several; a request needs money in all of them.",
        "POST /admin/v1/budgets",
        option(*_LIMIT, required=True, type=Amount(), help=_LIMIT_HELP),
        option("--period", type=click.Choice(["hour", "day", "month"]), help="A period that recurs, in UTC."),
        option("--from", "start", type=MOMENT, help="Start of a fixed period, a whole minute."),
        option("--to", "end", type=MOMENT, help="End of the fixed period, not included."),
        option("--key", "api_key_id", help="Id of the one key that it binds.  [default: the whole tenant]"),
        option(
            "--model", help="The one model that it binds, with its adapters and its overflow.  [default: every model]"
        ),
        option("--tier", help="The one tier that it binds: interactive or batch.  [default: both]"),
        _KIND,
        idempotency_key("the same key never makes a second budget"),
        shows="id",
        models=lambda sent: [sent["model"]] if "model" in sent else [],
        reads=_budget,
        example="budgets add acme --limit 25.00 --period month",
    ),
    row(
        "list",
        "List budgets, the newest first, with what is settled in the current period.",
        "GET /admin/v1/budgets",
        option("--tenant", help=ONE_TENANT),
        shows=_budgets,
    ),
    row(
        "set BUDGET_ID",
        "Change the limit or the kind of the budget BUDGET_ID. The change holds within seconds, for running"
        " requests too.",
        "PATCH /admin/v1/budgets/{budget_id}",
        option(*_LIMIT, type=Amount(), help=_LIMIT_HELP),
        _KIND,
        shows="id",
        partial=True,
        reads=_hardness,
        example="budgets set budget_0123 --limit 50.00",
    ),
    row(
        "remove BUDGET_ID",
        "Remove the budget BUDGET_ID, so that it binds no request any more.",
        "DELETE /admin/v1/budgets/{budget_id}",
        shows="id",
    ),
    row(
        "adjust BUDGET_ID AMOUNT",
        "Raise the limit of the budget BUDGET_ID by AMOUNT for a time. A negative amount, such as -5.00, lowers it.",
        "POST /admin/v1/budgets/{budget_id}/adjustments",
        argument("micro_units", metavar="AMOUNT", type=Amount(signed=True)),
        option(
            "--from", type=MOMENT, default=lambda: int(time.time()), show_default="now", help="Start of the change."
        ),
        option("--to", type=MOMENT, required=True, help="End of the change, not included."),
        idempotency_key("with the same key, and --from, the limit is never changed twice"),
        shows="id",
        example="budgets adjust budget_0123 10.00 --to 2026-12-31",
    ),
)

COMMANDS: tuple[click.Command, ...] = (LIMITS, PERMISSIONS, QUOTAS, BUDGETS)
