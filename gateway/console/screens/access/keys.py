"""API keys: the list of a tenant's keys, a new key, and one key with everything that may be done to it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from multidict import MultiDict
from yarl import URL

from gateway.console import choices, pages
from gateway.console.calls import Refused, or_refused
from gateway.console.screens.access.limits import LIMITS, limits_table
from gateway.console.tables import Column, Table, next_page
from gateway.console.viewer import Viewer

SCOPES: dict[str, str] = {
    "chat": "chat, completions, tokenizing and quotes",
    "embeddings": "embeddings, rerank and score",
    "batch": "batches",
    "files:read": "reading files",
    "files:write": "uploading and deleting files",
    "usage:read": "usage, costs and the request log",
    "keys": "managing keys of this tenant that may do no more than this one, and its webhooks",
}
USUAL = tuple(name for name in SCOPES if name != "keys")
OVERLAPS = {0: "no longer", 3_600: "1 hour", 86_400: "1 day", 604_800: "7 days"}
"""Seconds for which an old secret works on after a rotation, with their words."""
DAYS = {"": "never", "30": "30 days", "90": "90 days", "365": "365 days"}
DAY_S = 86_400
PAGE_ROWS = 100


async def list_keys(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    tenant_id = _tenant_of(request, viewer)
    tenants = await choices.tenants(viewer)
    table = None
    if viewer.sees_all and not tenant_id:
        listed = await viewer.listed(choices.PROJECTS, PAGE_ROWS)
        table = Table("tenants", _TENANTS, listed["data"], "There is no tenant yet.", next_page(listed))
    elif tenant_id and _reads(viewer):
        found = await viewer.listed(viewer.own("keys"), PAGE_ROWS, project_id=tenant_id)
        rows = [{**one, "state": state_of(one, time.time())} for one in found["data"]]
        empty = _EMPTY if _manages(viewer) else "This tenant has no keys."
        table = Table("keys", _COLUMNS, [_row(one) for one in rows], empty, next_page(found))
    return pages.show(
        request,
        viewer,
        "keys.html",
        table=table,
        tenant_id=tenant_id,
        tenants=tenants,
        reads=_reads(viewer),
        manages=_manages(viewer),
    )


async def new_key(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    tenant_id = _tenant_of(request, viewer)
    form = MultiDict([("project_id", tenant_id), *(("scopes", name) for name in USUAL)])
    return await _new_page(request, viewer, form)


async def create(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Makes the key. Its value is on the answered page and nowhere else."""
    form = await pages.fields_of(request)
    days = choices.number(form.get("days"))
    wanted: dict[str, Any] = {
        "project_id": form.get("project_id") or viewer.principal.tenant_id,
        "name": form.get("name"),
        "scopes": form.getall("scopes", []),
        "models": choices.entries(form.get("models")) or None,
        "addresses": choices.entries(form.get("addresses")) or None,
        "expires_in_seconds": days * DAY_S if isinstance(days, int) else days,
        **{name: choices.number(form.get(name)) for name in LIMITS},
    }
    if not wanted["scopes"]:
        return await _new_page(request, viewer, form, Refused(400, "Choose at least one scope."))
    try:
        made = await viewer.post(viewer.own("keys"), wanted)
    except Refused as refused:
        return await _new_page(request, viewer, form, refused)
    return _secret_page(request, viewer, made, "New key")


async def change(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    wanted: dict[str, Any] = {name: choices.number(form.get(name)) for name in LIMITS}
    for name in ("models", "addresses"):
        wanted[name] = choices.entries(form.get(name)) if f"only_{name}" in form else None
    return await _changed(request, viewer, wanted, "changed")


async def disable(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _changed(request, viewer, {"disabled": True}, "disabled")


async def enable(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return await _changed(request, viewer, {"disabled": False}, "enabled")


async def rotate(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    try:
        made = await viewer.post(
            f"{_one(request, viewer)}/rotate", {"overlap_seconds": choices.number(form.get("overlap"))}
        )
    except Refused as refused:
        return await show_key(request, viewer, refused)
    return _secret_page(request, viewer, made, "New value of a key")


async def revoke(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    key = await viewer.get(_one(request, viewer))
    try:
        await viewer.delete(_one(request, viewer))
    except Refused as refused:
        return await show_key(request, viewer, refused)
    return pages.see_other("/keys", project_id=key["project_id"] if viewer.sees_all else None, done="revoked")


def state_of(key: Mapping[str, Any], now: float) -> str:
    if key["disabled"]:
        return "disabled"
    return "expired" if key["expires_at"] is not None and key["expires_at"] <= now else "active"


def _reads(viewer: Viewer) -> bool:
    return viewer.sees_all or "keys" in viewer.principal.scopes


def _manages(viewer: Viewer) -> bool:
    return viewer.may_change and _reads(viewer)


def _tenant_of(request: web.Request, viewer: Viewer) -> str:
    return request.query.get("project_id", "").strip() if viewer.sees_all else viewer.principal.tenant_id


def _one(request: web.Request, viewer: Viewer) -> str:
    return f"{viewer.own('keys')}/{pages.part(request, 'id')}"


async def _changed(request: web.Request, viewer: Viewer, wanted: Mapping[str, Any], done: str) -> web.StreamResponse:
    try:
        await viewer.patch(_one(request, viewer), wanted)
    except Refused as refused:
        return await show_key(request, viewer, refused)
    return pages.see_other(f"/keys/{pages.part(request, 'id')}", done=done)


async def show_key(request: web.Request, viewer: Viewer, refused: Refused | None = None) -> web.StreamResponse:
    key = await viewer.get(_one(request, viewer))
    in_force, limiter_refused = await or_refused(viewer.get(f"{_one(request, viewer)}/limits"))
    form: Mapping[str, Any] = await pages.fields_of(request) if request.method == "POST" else {}
    return pages.show(
        request,
        viewer,
        "key.html",
        found=key,
        tenant_page=choices.tenant_page(key) if viewer.sees_all else None,
        key_state=state_of(key, time.time()),
        refused=refused,
        manages=_manages(viewer),
        limits=LIMITS,
        table=None if in_force is None else limits_table(in_force["data"]),
        own_address=URL.build(path=f"{pages.ROOT}/keys/{key['id']}"),
        limiter_refused=limiter_refused,
        overlaps=OVERLAPS,
        form=form if refused is not None and "models" in form else None,
    )


async def _new_page(
    request: web.Request, viewer: Viewer, form: MultiDict[str], refused: Refused | None = None
) -> web.StreamResponse:
    mine = {name: words for name, words in SCOPES.items() if viewer.sees_all or name in viewer.principal.scopes}
    return pages.show(
        request,
        viewer,
        "new_key.html",
        form=form,
        refused=refused,
        scopes=mine,
        limits=LIMITS,
        days=DAYS,
        tenants=await choices.tenants(viewer),
    )


def _secret_page(request: web.Request, viewer: Viewer, made: Mapping[str, Any], title: str) -> web.StreamResponse:
    return pages.show(request, viewer, "key_secret.html", made=made, secret_title=title)


_EMPTY = "This tenant has no keys. Make the first one with the button above."
_TENANTS: Sequence[Column] = (
    Column("name", "Tenant", link=lambda row: f"{pages.ROOT}/keys?project_id={row['id']}"),
    Column("id", "Tenant id", "code"),
    Column("status", "State", "state"),
)
_COLUMNS: Sequence[Column] = (
    Column("name", "Name", link=lambda row: f"{pages.ROOT}/keys/{row['id']}"),
    Column("redacted_value", "Value", "code"),
    Column("state", "State", "state"),
    Column("scopes", "Scopes"),
    Column("models", "Models"),
    Column("addresses", "Addresses"),
    Column("last_used_at", "Last use", "moment"),
    Column("expires_at", "Expires", "moment"),
    Column("created_at", "Made", "moment"),
    Column("id", "Key", "code"),
)


def _row(key: Mapping[str, Any]) -> dict[str, Any]:
    def listed(name: str) -> str:
        return "any" if key[name] is None else ", ".join(key[name]) or "none"

    return {
        **key,
        "name": key["name"] or "no name",
        "scopes": ", ".join(key["scopes"]),
        "models": listed("models"),
        "addresses": listed("addresses"),
    }


ROUTES = [
    pages.get("/keys", list_keys),
    pages.get("/keys/new", new_key, changes=True),
    pages.post("/keys", create),
    pages.get("/keys/{id}", show_key),
    pages.post("/keys/{id}", change),
    pages.post("/keys/{id}/disable", disable),
    pages.post("/keys/{id}/enable", enable),
    pages.post("/keys/{id}/rotate", rotate),
    pages.post("/keys/{id}/revoke", revoke),
]
