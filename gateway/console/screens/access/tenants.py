"""Tenants: their list, a new one, and one tenant with its state, the limits in force and what its requests may cost."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web
from yarl import URL

from gateway.console import choices, pages
from gateway.console.calls import Refused, or_refused
from gateway.console.screens.access.limits import LIMITS, MONEY, WORDS, limits_table
from gateway.console.tables import Column, Table, next_page
from gateway.console.viewer import Viewer

PERIODS = ("hour", "day", "month")
KINDS = {"hard": "refuse requests", "soft": "tell only", "shadow": "watch only"}
LEVELS = {"tenant": "the tenant", "key": "one key", "model": "one model", "end_user": "each end user"}
DIMENSIONS = {name: words for name, words in WORDS.items() if name != MONEY}
TRIED = {
    "requests_per_minute": "max_requests_per_1_minute",
    "tokens_per_minute": "max_tokens_per_1_minute",
    "input_tokens_per_minute": "max_input_tokens_per_1_minute",
    "output_tokens_per_minute": "max_output_tokens_per_1_minute",
    "requests_per_day": "max_requests_per_1_day",
}
"""The quotas that can be tried on past requests, by their names in the preview."""
NOT_TRIED = (
    "Only limits of requests and tokens, of the tenant, a key or a model, can be tried on past requests. For others, store "
    "one that watches only, and see what it would have refused."
)
PAGE_ROWS = 100
_MICRO_UNITS = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,6}))?", re.ASCII)


async def create(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    try:
        made = await viewer.post("/v1/organization/projects", {"name": form.get("name")})
    except Refused as refused:
        return await list_tenants(request, viewer, refused)
    return pages.see_other(f"/tenants/{made['id']}", done="created")


async def limit(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Stores the limits of the form, or with the button Preview says what they would have refused."""
    form = await pages.fields_of(request)
    model = form.get("model") or None
    names = [name for name in LIMITS if not (model and name == "max_running_requests")]
    wanted: dict[str, Any] = {name: choices.number(form.get(name)) for name in names}
    if "preview" not in form:
        if model is None:
            return await _done(request, viewer, viewer.patch(_admin(request), wanted), "changed")
        path = f"{_project(request)}/rate_limits/rl-{quote(model, safe='')}"
        return await _done(request, viewer, viewer.post(path, wanted), "changed")
    asked = {name: value for name, value in wanted.items() if name != "max_running_requests"}
    return await _tried(request, viewer, asked | {"model": model})


async def set_quota(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Stores or removes the quota of the form, or says what it would have refused."""
    form = await pages.fields_of(request)
    level, dimension, subject = (form.get(name, "") for name in ("level", "dimension", "subject"))
    limit = choices.number(form.get("limit"))
    if "preview" in form:
        if level == "end_user" or dimension not in TRIED:
            return await show_tenant(request, viewer, Refused(400, NOT_TRIED))
        subjects = {"model": "model", "key": "api_key_id"}
        asked = {subjects[level]: subject} if level in subjects else {}
        return await _tried(request, viewer, {TRIED[dimension]: limit, **asked})
    wanted = {
        "project_id": request.match_info["id"],
        "level": level,
        "dimension": dimension,
        "subject": subject,
        # The API removes a quota whose limit is null, so a field that was left blank is sent as text, and refused.
        "limit": None if "delete" in form else "" if limit is None else limit,
        "shadow": "shadow" in form,
    }
    done = "deleted" if "delete" in form else "changed"
    return await _done(request, viewer, viewer.post("/admin/v1/quotas", wanted), done)


async def _tried(request: web.Request, viewer: Viewer, asked: Mapping[str, Any]) -> web.StreamResponse:
    """Shows what these limits would have refused of the requests of the last 7 days."""
    try:
        seen = await viewer.post(f"{_admin(request)}/limits/preview", asked)
    except Refused as refused:
        return await show_tenant(request, viewer, refused)
    return await show_tenant(request, viewer, preview=seen)


async def suspend(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _done(request, viewer, viewer.patch(_admin(request), {"suspended": True}), "suspended")


async def resume(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _done(request, viewer, viewer.patch(_admin(request), {"suspended": False}), "resumed")


async def archive(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _done(request, viewer, viewer.post(f"{_project(request)}/archive", None), "archived")


async def add_budget(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    wanted = {
        "project_id": request.match_info["id"],
        "period": form.get("period"),
        "limit_micro_units": _fraction(form.get("amount", ""), _MICRO_UNITS, 6),
        "api_key_id": form.get("api_key_id") or None,
        "model": form.get("model") or None,
        "hard": form.get("kind") == "hard",
        "shadow": form.get("kind") == "shadow",
    }
    if "preview" in form:
        names = ("period", "limit_micro_units", "api_key_id", "model")
        return await _tried(request, viewer, {name: wanted[name] for name in names})
    return await _done(request, viewer, viewer.post("/admin/v1/budgets", wanted), "created")


async def change_budget(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    path = f"/admin/v1/budgets/{pages.part(request, 'budget_id')}"
    if "delete" in form:
        return await _done(request, viewer, viewer.delete(path), "deleted")
    amount = _fraction(form.get("amount", ""), _MICRO_UNITS, 6)
    if "preview" in form:
        present = await viewer.get(path)
        names = ("period", "api_key_id", "model", "tier")
        asked = {name: present[name] for name in names}
        return await _tried(request, viewer, asked | {"limit_micro_units": amount})
    return await _done(request, viewer, viewer.patch(path, {"limit_micro_units": amount}), "changed")


async def spend_limit(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    path = f"{_project(request)}/spend_limit"
    if "delete" in form:
        return await _done(request, viewer, viewer.delete(path), "deleted")
    return await _done(request, viewer, viewer.post(path, _monthly(form.get("amount", ""))), "changed")


async def add_alert(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    channel = {"type": "email", "recipients": choices.entries(form.get("recipients"))}
    wanted = _monthly(form.get("amount", "")) | {"notification_channel": channel}
    return await _done(request, viewer, viewer.post(f"{_project(request)}/spend_alerts", wanted), "created")


async def delete_alert(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    path = f"{_project(request)}/spend_alerts/{pages.part(request, 'alert_id')}"
    return await _done(request, viewer, viewer.delete(path), "deleted")


async def list_tenants(request: web.Request, viewer: Viewer, refused: Refused | None = None) -> web.StreamResponse:
    archived = request.query.get("include_archived") == "true"
    found = await viewer.listed("/admin/v1/tenants", PAGE_ROWS, include_archived="true" if archived else None)
    return pages.show(
        request,
        viewer,
        "tenants.html",
        refused=refused,
        archived=archived,
        name=(await pages.fields_of(request)).get("name", "") if refused else "",
        table=Table(
            "tenants", _COLUMNS, found["data"], "There is no tenant yet. Make the first one above.", next_page(found)
        ),
    )


async def show_tenant(
    request: web.Request, viewer: Viewer, refused: Refused | None = None, preview: Mapping[str, Any] | None = None
) -> web.StreamResponse:
    tenant = await viewer.get(_admin(request))
    form = await pages.fields_of(request) if request.method == "POST" else {}
    models = await viewer.get(f"{_project(request)}/rate_limits")
    budgets = await viewer.get("/admin/v1/budgets", project_id=tenant["id"], limit=PAGE_ROWS)
    alerts = await viewer.get(f"{_project(request)}/spend_alerts", limit=PAGE_ROWS)
    in_force, limiter_refused = await or_refused(viewer.get(f"{_admin(request)}/limits"))
    quotas = await viewer.get("/admin/v1/quotas", project_id=tenant["id"])
    spend, _ = await or_refused(viewer.get(f"{_project(request)}/spend_limit"))
    return pages.show(
        request,
        viewer,
        "tenant.html",
        tenant=tenant,
        own_address=URL.build(path=f"{pages.ROOT}/tenants/{tenant['id']}"),
        refused=refused,
        preview=preview,
        form=form,
        limits=LIMITS,
        models=models["data"],
        budgets=budgets["data"],
        tried_budget=request.match_info.get("budget_id"),
        quotas=quotas["data"],
        levels=LEVELS,
        dimensions=DIMENSIONS,
        alerts=alerts["data"],
        spend=spend,
        periods=PERIODS,
        kinds=KINDS,
        table=None if in_force is None else limits_table(in_force["data"]),
        limiter_refused=limiter_refused,
    )


async def _done(request: web.Request, viewer: Viewer, call: Awaitable[Any], done: str) -> web.StreamResponse:
    try:
        await call
    except Refused as refused:
        if refused.status == 404:
            raise
        return await show_tenant(request, viewer, refused)
    return pages.see_other(f"/tenants/{pages.part(request, 'id')}", done=done)


def _monthly(amount: str) -> dict[str, Any]:
    return {"amount": amount.strip(), "interval": "month"}


def _fraction(text: str, pattern: re.Pattern[str], places: int) -> int | str:
    """Returns an amount such as 12.50 in its smallest unit. Other texts stay, and the API refuses them."""
    found = pattern.fullmatch(text)
    return text if found is None else int(found[1] + (found[2] or "").ljust(places, "0"))


def _admin(request: web.Request) -> str:
    return f"/admin/v1/tenants/{pages.part(request, 'id')}"


def _project(request: web.Request) -> str:
    return f"/v1/organization/projects/{pages.part(request, 'id')}"


_COLUMNS: Sequence[Column] = (
    Column("name", "Name", link=lambda row: f"{pages.ROOT}/tenants/{row['id']}"),
    Column("id", "Tenant", "code"),
    Column("status", "State", "state"),
    Column("max_requests_per_1_minute", "Requests a minute", "count"),
    Column("max_tokens_per_1_minute", "Tokens a minute", "count"),
    Column("max_running_requests", "At one time", "count"),
    Column("weight", "Weight"),
    Column("time_zone", "Time zone"),
    Column("created_at", "Made", "moment"),
)

_Action = Callable[[web.Request, Viewer], Awaitable[web.StreamResponse]]
_ACTIONS: dict[str, _Action] = {
    "limits": limit,
    "suspend": suspend,
    "resume": resume,
    "archive": archive,
    "quotas": set_quota,
    "budgets": add_budget,
    "budgets/{budget_id}": change_budget,
    "spend-limit": spend_limit,
    "alerts": add_alert,
    "alerts/{alert_id}/delete": delete_alert,
}

ROUTES = [
    pages.get("/tenants", list_tenants),
    pages.post("/tenants", create),
    pages.get("/tenants/{id}", show_tenant),
    *(pages.post(f"/tenants/{{id}}/{path}", action) for path, action in _ACTIONS.items()),
]
