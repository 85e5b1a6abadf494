"""The caches: hits and kept KV by tenant, evictions, published prefixes with their forms, and the purge of a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.console import choices, pages
from gateway.console.calls import Refused
from gateway.console.formats import money
from gateway.console.tables import Column, Table, next_page
from gateway.console.viewer import Viewer

PREFIXES = "/admin/v1/prefixes"
NEW = ("model", "kind", "name", "text", "ttl_s")
EMPTY_FORM = dict.fromkeys(NEW, "")
KINDS = {"system": "System message of a chat", "text": "Start of a prompt for /v1/completions"}


async def show_cache(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await viewer.get("/admin/v1/cache", hours=request.query.get("hours"))
    tenants = await choices.named(viewer, map(_tenant, found["tenants"]))
    tables = {
        "tenants": Table("cache-tenants", _TENANT_COLUMNS, tenants, _NO_TENANTS),
        "workers": Table("cache-workers", _WORKER_COLUMNS, [_worker(one) for one in found["workers"]], _NO_WORKERS),
        "prefixes": Table("cache-prefixes", _PREFIX_COLUMNS, [_prefix(one) for one in found["prefixes"]], _NO_PREFIXES),
    }
    return pages.show(request, viewer, "cache.html", found=found, tables=tables)


async def publish(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    form = await pages.fields_of(request)
    values = {name: form.get(name, "") for name in NEW}
    text = values["text"].replace("\r\n", "\n")  # browsers send line ends of their own
    body: dict[str, Any] = {"model": values["model"]}
    if values["kind"] == "text":
        body["text"] = text
    else:
        body["messages"] = [{"role": "system", "content": text}]
    if values["name"]:
        body["name"] = values["name"]
    if values["ttl_s"]:
        body["ttl_s"] = choices.number(values["ttl_s"])
    try:
        await viewer.post(PREFIXES, body)
    except Refused as refused:
        return await show_prefixes(request, viewer, values, refused)
    return pages.see_other("/cache/prefixes")


async def delete(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    await viewer.delete(f"{PREFIXES}/{pages.part(request, 'id')}")
    return pages.see_other("/cache/prefixes")


async def ask_purge(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Shows whose cache would be dropped, before the form that drops it."""
    found = await viewer.get(f"/v1/organization/projects/{quote(request.query.get('project_id', ''), safe='')}")
    return pages.show(request, viewer, "cache_purge.html", found=found)


async def purge(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await viewer.post(f"/admin/v1/tenants/{pages.part(request, 'id')}/purge-cache", {})
    return pages.see_other("/cache", purged=found["id"], workers=str(found["num_workers"]))


async def show_prefixes(
    request: web.Request, viewer: Viewer, values: Mapping[str, str] = EMPTY_FORM, refused: Refused | None = None
) -> web.StreamResponse:
    found = await viewer.listed(PREFIXES, 100)
    workers = await viewer.get("/admin/v1/workers")
    return pages.show(
        request,
        viewer,
        "prefixes.html",
        gateway=workers["gateway"],
        table=Table(
            "prefixes",
            _PUBLISHED_COLUMNS,
            [_published(one) for one in found["data"]],
            f"{_NONE_PUBLISHED} {_PUBLISH}" if viewer.may_change else _NONE_PUBLISHED,
            next_page(found),
        ),
        models=sorted({one["model"] for one in workers["data"]}),
        kinds=KINDS,
        values=values,
        refused=refused,
    )


_NO_TENANTS = "No request used a cache in these hours. Send one, or ask for more hours."
_NO_WORKERS = "No worker is linked with this gateway. Start one with `headgate worker` or `headgate up`."
_NO_PREFIXES = "This gateway has seen no prompt of 64 tokens or more since its start."
_NONE_PUBLISHED = "No prefix is published."
_PUBLISH = "Publish a system prompt that all tenants share with the form below."


_TENANT_COLUMNS = (
    choices.TENANT,
    Column("num_requests", "Requests", "count"),
    Column("prompt_tokens", "Prompt tokens", "count"),
    Column("cached_tokens", "Cached tokens", "count"),
    Column("cached_share", "Cached share", "share"),
    Column("blocks", "Blocks now", "count"),
    Column("pinned_blocks", "Pinned now", "count"),
    Column("evicted_blocks", "Evicted", "count"),
    Column("kept_mb_hours", "Kept, MB hours", "count"),
    Column("pinned_mb_hours", "Pinned, MB hours", "count"),
    Column("cost", "Cost of what was kept"),
    choices.TENANT_ID,
)
_WORKER_COLUMNS = (
    Column("id", "Worker", "code", link=lambda row: f"{pages.ROOT}/workers/{quote(row['id'], safe='')}"),
    Column("model", "Model"),
    Column("nodes", "Nodes of the tree", "count"),
    Column("pinned_blocks", "Pinned blocks", "count"),
    Column("capacity", "Evicted for room", "count"),
    Column("quota", "Evicted over quota", "count"),
    Column("idle", "Evicted when idle", "count"),
)
_PREFIX_COLUMNS = (
    Column("hash", "First 64 tokens, hash", "code"),
    Column("model", "Model"),
    Column("region", "Region"),
    Column("num_requests", "Requests", "count"),
    Column("prompt_tokens", "Prompt tokens", "count"),
    Column("cached_tokens", "Cached tokens", "count"),
    Column("cached_share", "Cached share", "share"),
)
_PUBLISHED_COLUMNS = (
    Column("id", "Prefix", "code"),
    Column("name", "Name"),
    Column("model", "Model"),
    Column("num_tokens", "Tokens", "count"),
    Column("state", "State"),
    Column("on_workers", "On workers"),
    Column("created_at", "Published", "moment"),
    Column("expires_at", "Ends", "moment"),
)


def _tenant(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **one,
        "kept_mb_hours": round(one["kept_byte_hours"] / 1e6),
        "pinned_mb_hours": round(one["pinned_byte_hours"] / 1e6),
        "cost": ", ".join(money(charge["charge_micro_units"], charge["currency"]) for charge in one["charges"]),
    }


def _worker(one: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, **dict.fromkeys(("capacity", "quota", "idle"), 0), **one["evicted_blocks"]}


def _prefix(one: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, "region": "published" if one["public"] else "a tenant's own"}


def _published(one: Mapping[str, Any]) -> dict[str, Any]:
    told = [f"{at['worker']}: {at['state']}" + (f", {at['reason']}" if at["reason"] else "") for at in one["workers"]]
    return {**one, "on_workers": "; ".join(told)}


ROUTES = [
    pages.get("/cache", show_cache),
    pages.get("/cache/prefixes", show_prefixes),
    pages.post("/cache/prefixes", publish),
    pages.post("/cache/prefixes/{id}/delete", delete),
    pages.get("/cache/purge", ask_purge),
    pages.post("/cache/tenants/{id}/purge", purge),
]
