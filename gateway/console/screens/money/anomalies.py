"""Anomalies: keys whose last hours are unusual, worst first, with what looks wrong and where it is stopped; and end
users whose day is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.console import choices, pages
from gateway.console.formats import count, money
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

HOURS: dict[str, str] = {"1": "this hour", "4": "4 hours", "12": "12 hours", "24": "24 hours"}
SUSPICIONS = {
    "leaked_key": "the key may be leaked",
    "spend_spike": "spending rose",
    "more_requests": "far more requests",
}
SIGNALS = {
    "more_requests": "more requests than usual",
    "more_spend": "higher charge than usual",
    "new_model": "a model that it did not use before",
    "silent_hour": "an hour in which it was silent before",
}
CAUSES = {
    "more_requests": "more requests",
    "longer_requests": "longer requests",
    "less_from_cache": "less of the prompts came from the cache",
    "new_model": "another model",
    "larger_share_of_output": "a larger share of output",
    "price_per_token": "a higher price of a token",
}


async def list_anomalies(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    hours = request.query.get("hours") or "4"
    tenant_id = request.query.get("project_id") if viewer.sees_all else None
    found = await viewer.get(viewer.own("anomalies"), hours=hours, project_id=tenant_id)
    tables = [
        Table("anomalies", choices.columns_for(viewer, _columns(viewer)), [_row(one) for one in found["data"]], _EMPTY),
        Table(
            "unusual-end-users",
            choices.columns_for(viewer, _USER_COLUMNS),
            [_user_row(one) for one in found["end_users"]],
            _NO_USERS,
        ),
    ]
    return pages.show(
        request,
        viewer,
        "anomalies.html",
        tables=tables,
        hours=hours,
        windows=HOURS,
        tenant_id=tenant_id or "",
        tenants=await choices.tenants(viewer),
    )


_EMPTY = "Nothing is unusual. Look at more hours, or come back later: the current hour is judged as it goes."


_NO_USERS = "No end user's day is unusual. Requests name their end user in 'user'."


def _columns(viewer: Viewer) -> Sequence[Column]:
    manages = viewer.may_change and (viewer.sees_all or "keys" in viewer.principal.scopes)
    act = [Column("act", "Act", link=_disabling)] if manages else []
    suspend = [Column("suspend", "Or", link=_suspending)] if viewer.sees_all and viewer.may_change else []
    return [
        Column("peak_time", "Worst hour", "moment"),
        Column("suspicion", "Suspicion"),
        Column("project_name", "Tenant", link=_tenant_page, names_tenant=True),
        Column("api_key", "Key", link=_key_page if viewer.sees_all or manages else None),
        *act,
        *suspend,
        Column("why", "Why", "words"),
        Column("cause", "First cause of the cost"),
        Column("new_models", "New models"),
        Column("requests", "Requests, usually"),
        Column("charge", "Charge, usually"),
        Column("num_hours", "Hours", "count"),
    ]


def _user_row(one: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, **_usually(one)}


def _usually(one: Mapping[str, Any]) -> dict[str, str]:
    requests, charge = one["requests"], one["charge_micro_units"]
    return {
        "requests": f"{count(requests['observed'])}, {count(requests['usual'])}",
        "charge": f"{money(charge['observed'], one['currency'])}, {money(charge['usual'], one['currency'])}",
    }


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **one,
        "suspicion": SUSPICIONS[one["suspicion"]],
        "api_key": one["api_key_name"] or one["api_key_id"],
        "why": ", ".join(SIGNALS[name] for name in one["signals"]),
        "cause": CAUSES[one["cause"]] if one["cause"] else None,
        "new_models": ", ".join(one["new_models"]),
        **_usually(one),
        "act": "Disable the key" if one["api_key_works"] else "does not work any more",
        "suspend": "Suspend the tenant" if one["project_status"] == "active" else one["project_status"],
    }


def _tenant_page(row: Mapping[str, Any]) -> str:
    return f"{pages.ROOT}/tenants/{quote(row['project_id'], safe='')}"


_USER_COLUMNS = (
    Column("end_user", "End user"),
    Column("project_id", "Tenant", "code", link=_tenant_page, names_tenant=True),
    Column("requests", "Requests today, usually"),
    Column("charge", "Charge today, usually"),
)


def _key_page(row: Mapping[str, Any]) -> str:
    return f"{pages.ROOT}/keys/{quote(row['api_key_id'], safe='')}"


def _disabling(row: Mapping[str, Any]) -> str | None:
    """The key's page confirms what happens before it is disabled."""
    return f"{_key_page(row)}#disable" if row["api_key_works"] else None


def _suspending(row: Mapping[str, Any]) -> str | None:
    return f"{_tenant_page(row)}#suspend" if row["project_status"] == "active" else None


ROUTES = [pages.get("/anomalies", list_anomalies)]
