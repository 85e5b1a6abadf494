"""The rows of the table that are about tenants: `headgate tenants`, `keys`, `audit`."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
import msgspec

from gateway.cli.admin_commands import (
    COUNT,
    END_STREAMS,
    ONE_TENANT,
    REQUEST_LIMITS,
    Fields,
    Finite,
    OrNone,
    Whole,
    group,
    option,
    row,
    several,
)
from gateway.cli.answers import Grid, fields, one_sentence
from gateway.cli.api import PROJECTS, AdminApi, ApiFailed, segment
from gateway.cli.input_files import text_of
from gateway.cli.money import cost
from gateway.cli.new_key import create_key, owner_is_named
from gateway.cli.times import moment

DAY_S = 86_400
MAX_DAYS = 3660
MAX_EXPIRES_IN_S = 10**10
MODELS = several("--model", "models", help="A model that the key may use")
ADDRESSES = several("--address", "addresses", help="An address or network from which the key may be used")
DISABLED = "Refuse the key with 401, or accept it again."
SHARE = (
    "weight",
    "time_zone",
    "stores_responses",
    "buys_overflow",
    *(f"cache_{name}" for name in ("quota_blocks", "floor_blocks", "ttl_s", "read", "write", "isolation")),
)


def _create_tenant(api: AdminApi, fields: Fields) -> dict[str, Any]:
    name = fields["name"]
    try:
        return api.call("POST", PROJECTS, {"name": name})
    except ApiFailed as error:
        if error.code != "name_taken":
            raise
    if not fields["if_not_exists"]:
        raise ApiFailed(f"A tenant is called {name.strip()!r} already; with --if-not-exists its id is shown.")
    return api.project(name.strip())


def _deletion(ctx: click.Context) -> str:
    """Returns the question before a tenant is deleted, with what it is still to be billed."""
    with one_sentence():
        api = AdminApi(ctx.params["home"])
        tenant_id = api.project(ctx.params["tenant"], archived=True)["id"]
        left = api.call("GET", f"/admin/v1/tenants/{segment(tenant_id)}/uninvoiced")
    question = "What the tenant stored can never be read again. Go on?"
    if not left["amount_micro_units"]:
        return question
    amount = cost(left["amount_micro_units"], left["currency"])
    return (
        f"{amount} of its charges are on no invoice yet ({', '.join(left['periods'])}): a later close bills them to"
        f" {tenant_id}, without its name. {question}"
    )


TENANTS = group(
    "tenants",
    "Create, show, change, suspend, archive and delete tenants. A tenant is named by its id or its name.",
    row(
        "create NAME",
        "Create the tenant NAME and print its id. `headgate keys create` then makes its first key.",
        _create_tenant,
        option(
            "--if-not-exists", is_flag=True, help="Print the id of the tenant that has the name, where there is one."
        ),
        shows="id",
        example="tenants create acme",
    ),
    row(
        "list",
        "List the tenants, the newest first.",
        f"GET {PROJECTS}",
        option("--all", "include_archived", is_flag=True, help="List archived tenants too."),
        shows=("id", "name", "status", "created_at"),
    ),
    row(
        "show TENANT",
        "Show the limits and the settings of TENANT, and its share of each worker.",
        "GET /admin/v1/tenants/{tenant}",
        shows=fields,
    ),
    row(
        "rename TENANT NAME",
        "Give TENANT the new name NAME.",
        f"POST {PROJECTS}/{{tenant}}",
        shows="name",
        example="tenants rename acme apex",
    ),
    row(
        "set TENANT",
        "Set the share that TENANT has of each worker, and its time zone. Options that are not given stay.",
        "PATCH /admin/v1/tenants/{tenant}",
        option("--weight", type=Finite(), help="Share of a busy worker, where a new tenant's share is 1."),
        option("--time-zone", help="Time zone in which its invoices and ends of budgets are shown."),
        option("--cache-quota-blocks", type=COUNT, help="The most cached blocks in each worker; `none` is no bound."),
        option("--cache-floor-blocks", type=COUNT, help="Cached blocks that no other tenant may take from it."),
        option("--cache-ttl-s", type=OrNone(min=1), help="Seconds in the cache after each use, or `none`."),
        option("--stores-responses/--no-stores-responses", default=None, help="Let its responses be stored, or never."),
        option(
            "--buys-overflow/--no-buys-overflow",
            default=None,
            help="Let upstreams answer at their price where workers would be late, or never.",
        ),
        option("--cache-read/--no-cache-read", default=None, help="Take its prompts from the cache, or never."),
        option("--cache-write/--no-cache-write", default=None, help="Keep its prompts in the cache, or never."),
        option(
            "--cache-isolation",
            type=click.Choice(["tenant", "key", "end_user"]),
            help="Whose cached prompts a request may meet: the tenant's, its key's, or its key's end user's.",
        ),
        shows=SHARE,
        partial=True,
        example="tenants set acme --weight 2 --time-zone Europe/Berlin --cache-quota-blocks none",
    ),
    row(
        "purge-cache TENANT",
        "Make every linked worker forget the cached prompts of TENANT. Prints how many workers were asked.",
        "POST /admin/v1/tenants/{tenant}/purge-cache",
        shows="num_workers",
    ),
    row(
        "suspend TENANT",
        "Suspend TENANT: its keys get 403 until `headgate tenants resume`, and its running requests end.",
        "PATCH /admin/v1/tenants/{tenant}",
        END_STREAMS,
        fixed={"suspended": True},
        shows="status",
        example="tenants suspend acme --let-streams-finish",
    ),
    row(
        "resume TENANT",
        "End the suspension of TENANT.",
        "PATCH /admin/v1/tenants/{tenant}",
        fixed={"suspended": False},
        shows="status",
    ),
    row(
        "archive TENANT",
        "Archive TENANT for good: its keys are refused, its running requests end, its open batches are"
        " cancelled, and its caches are purged. The books remain.",
        f"POST {PROJECTS}/{{tenant}}/archive",
        END_STREAMS,
        shows="status",
        confirm="Archiving is final: its keys are refused from now on. Go on?",
    ),
    row(
        "delete TENANT",
        "Destroy the stored data of TENANT: the key of its files and answers, and its names.\n\n"
        "The tenant must have been archived for as long as the gateway's HEADGATE_RETENTION_DAYS says (30 days by"
        " default). The books remain, under ids. Prints the report of what was destroyed.",
        "DELETE /admin/v1/tenants/{tenant}",
        shows=fields,
        with_archived=True,
        confirm=_deletion,
    ),
)


def _key_changes(given: Fields) -> Fields:
    for anything, name in (("any_model", "models"), ("any_address", "addresses")):
        if given.pop(anything):
            if given[name]:
                raise click.UsageError(
                    f"Give either --{anything.removeprefix('any_')} or --{anything.replace('_', '-')}, not both."
                )
            given[name] = "none"
    return given


def _leaked_key(_: Fields) -> Fields:
    value = text_of(sys.stdin, "Standard input").partition("\n")[0].strip()
    if not value:
        raise click.UsageError("Standard input has no key: give the value of one, as in `< leaked-key.txt`.")
    return {"value": value}


KEYS = group(
    "keys",
    "Create, show, change, rotate and revoke API keys.",
    row(
        "create [TENANT]",
        "Make a key for TENANT, an id or a name. Its value is shown this once.",
        create_key,
        option("--name", default="Secret Key", help="Name of the key in lists."),
        several(
            "--scope",
            "scopes",
            help="A scope of the key, such as `chat`, or `keys` to manage keys of its tenant; with --admin `admin:read`,"
            " which reads everything and changes nothing",
            default="everything but `keys`",
        ),
        option(
            "--expires-in-s",
            "expires_in_seconds",
            type=click.IntRange(1, MAX_EXPIRES_IN_S),
            help="Seconds until the key expires.  [default: it never expires]",
        ),
        MODELS,
        ADDRESSES,
        option("--admin", is_flag=True, help="Make a key of the operator, straight in the database, instead."),
        shows="value",
        models=lambda sent: sent.get("models", ()),
        reads=owner_is_named,
        example="keys create acme --name ci --scope chat --model my-model",
    ),
    row(
        "list TENANT",
        "List the keys of TENANT without their values.",
        f"GET {PROJECTS}/{{tenant}}/api_keys",
        shows=("id", "name", "redacted_value", "created_at", "last_used_at", "expires_at"),
    ),
    row(
        "show KEY_ID",
        "Show everything about the key KEY_ID but its value.",
        "GET /admin/v1/keys/{key_id}",
        shows=fields,
    ),
    row(
        "set KEY_ID",
        "Change what is given of the key KEY_ID; the rest stays. A limit of `none` is no limit.",
        "PATCH /admin/v1/keys/{key_id}",
        MODELS,
        ADDRESSES,
        option("--any-model", is_flag=True, help="The key may use every model that its tenant may use."),
        option("--any-address", is_flag=True, help="The key may be used from every address."),
        option("--disable/--enable", "disabled", default=None, show_default=False, help=DISABLED),
        *REQUEST_LIMITS,
        END_STREAMS,
        shows=fields,
        partial=True,
        models=lambda sent: sent.get("models") or (),
        reads=_key_changes,
        example="keys set key_0123 --model my-model --requests-per-minute 60 --running none",
    ),
    row(
        "rotate KEY_ID",
        "Give the key KEY_ID a new value, shown this once. A value before the last one ends now.",
        "POST /admin/v1/keys/{key_id}/rotate",
        option(
            "--overlap-s",
            "overlap_seconds",
            default=0,
            type=click.IntRange(0, 604_800),
            help="Seconds for which the old value still works; 7 days at most.",
        ),
        shows="value",
        example="keys rotate key_0123 --overlap-s 3600",
    ),
    row(
        "revoke TENANT KEY_ID",
        "Revoke the key KEY_ID of TENANT: it is refused everywhere within 5 seconds, and its running requests end.",
        f"DELETE {PROJECTS}/{{tenant}}/api_keys/{{key_id}}",
        END_STREAMS,
        shows="id",
        example="keys revoke acme key_0123",
    ),
    row(
        "report-leaked",
        "Revoke a key by its value, which is read from standard input, and end its running requests. Prints its id.",
        "POST /admin/v1/leaked-keys",
        shows="api_key_id",
        fails=lambda answer: None if answer["api_key_id"] else "No key that works has this value.",
        reads=_leaked_key,
        example="keys report-leaked < leaked-key.txt",
    ),
)


def _audit_filter(given: Fields) -> Fields:
    days = given.pop("days")
    return given if days is None else {**given, "effective_at[gte]": int(time.time()) - days * DAY_S}


def _audit_log(entries: list[dict[str, Any]]) -> Grid:
    columns = ("time (UTC)", "type", "actor", "tenant", "object", "details")
    return Grid(columns, [_audit_row(entry) for entry in entries])


def _audit_row(entry: dict[str, Any]) -> tuple[Any, ...]:
    details = dict(entry[entry["type"]])
    target = details.pop("id")
    actor = entry["actor"]
    who = actor["api_key"]["id"] if "api_key" in actor else actor["session"]["user"]["id"]
    when = moment(entry["effective_at"])
    tenant = entry.get("project", {}).get("name")
    text = msgspec.json.encode(details).decode() if details else ""
    return when, entry["type"], who, tenant, target, text


AUDIT = group(
    "audit",
    "Read the audit log: every change by API or command line, which nobody can edit.",
    row(
        "list",
        "List changes, the newest first.",
        "GET /v1/organization/audit_logs",
        option("--tenant", help=ONE_TENANT),
        several("--type", "event_types", help="Type of the change, such as `api_key.created`"),
        several("--actor", "actor_ids", help="Who made the change: the id of a key, `cli` or `system`"),
        several("--object", "resource_ids", help="Id of what was changed"),
        option("--days", type=click.IntRange(1, MAX_DAYS), help="Days back from now.  [default: all]"),
        option("--limit", default=100, type=Whole(1), help="The most changes that are listed."),
        shows=_audit_log,
        reads=_audit_filter,
        tenant_field="project_ids[]",
        with_archived=True,
        example="audit list --tenant acme --type api_key.created --days 30",
    ),
)


def _unusual(found: list[dict[str, Any]]) -> Grid:
    columns = ("worst hour (UTC)", "suspicion", "tenant", "key", "requests", "usually", "charge", "usually", "cause")
    return Grid(columns, [_unusual_row(one) for one in found])


def _unusual_row(one: dict[str, Any]) -> tuple[Any, ...]:
    requests, charge = one["requests"], one["charge_micro_units"]
    when = moment(one["peak_time"])
    amounts = (cost(charge["observed"], one["currency"]), cost(charge["usual"], one["currency"]))
    named = (one["suspicion"], one["project_name"], one["api_key_id"])
    return when, *named, requests["observed"], requests["usual"], *amounts, one["cause"]


ANOMALIES = group(
    "anomalies",
    "List keys that do what they never did. `headgate keys set KEY_ID --disable` stops one.",
    row(
        "list",
        "Compare the last hours of each key with the same hours of the 28 days before. The worst come first.",
        "GET /admin/v1/anomalies",
        option("--tenant", help=ONE_TENANT),
        option(
            "--hours", default=4, type=click.IntRange(1, 24), help="Hours that are judged, the current one included."
        ),
        shows=_unusual,
        example="anomalies list --hours 24",
    ),
)

COMMANDS: tuple[click.Command, ...] = (TENANTS, KEYS, AUDIT, ANOMALIES)
