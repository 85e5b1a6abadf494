"""`GET /v1/organization/audit_logs`: all changes and their actors, the newest first."""

from __future__ import annotations

import re

from aiohttp import web

from accounting.database import audit
from accounting.database.audit import AuditFilter, Comparison
from gateway.base import errors
from gateway.http.sql import reading
from gateway.routes.admin import route
from gateway.schema import audit_logs as shapes
from gateway.schema import query
from gateway.schema.organization import page_of, reply

ARRAYS = ("event_types", "project_ids", "actor_ids", "resource_ids")
COMPARISONS: tuple[Comparison, ...] = ("gt", "gte", "lt", "lte")
BOUNDS = tuple(f"effective_at[{comparison}]" for comparison in COMPARISONS)
_SECONDS = re.compile(r"\d{1,12}", re.ASCII)


async def list_entries(request: web.Request) -> web.Response:
    """Lists the entries of the audit log."""
    asked = request.query
    query.refuse_unknown(asked, (*ARRAYS, *BOUNDS, "limit", "after", "before"))
    types, tenant_ids, actors, object_ids = (query.array(asked, name) for name in ARRAYS)
    async with reading(request) as conn:
        page = await audit.list_entries(
            conn,
            AuditFilter(types, tenant_ids, actors, object_ids, _bounds(asked)),
            after=query.text(asked, "after"),
            before=query.text(asked, "before"),
            limit=query.limit(asked, 20, 100),
        )
    return reply(page_of(page, shapes.entry))


def _bounds(asked: query.Query) -> tuple[tuple[Comparison, int], ...]:
    found: dict[Comparison, int] = {}
    for comparison, name in zip(COMPARISONS, BOUNDS, strict=True):
        value = query.text(asked, name)
        if value is None:
            continue
        if not _SECONDS.fullmatch(value):
            raise errors.invalid(f"'{name}' must be a time in Unix seconds.", name, "invalid_type")
        found[comparison] = int(value)
    first = max(found.get("gte", 0), found.get("gt", -1) + 1)
    if first > min(found.get("lte", first), found.get("lt", first + 1) - 1):
        raise errors.invalid("No time lies within these bounds of 'effective_at'.", "effective_at")
    return tuple(found.items())


ROUTES = [route("GET", "/v1/organization/audit_logs", list_entries)]
