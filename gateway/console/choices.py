"""Fields of forms that several screens read: which tenant is meant, numbers that may be blank, a text with one entry a
line. Wrong values go to the API as they are, and its sentence is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.console.tables import Column
from gateway.console.viewer import Viewer

MAX_TENANTS = 100
_DIGITS = re.compile(r"-?[0-9]{1,18}", re.ASCII)


async def tenants(viewer: Viewer) -> Sequence[Mapping[str, Any]]:
    """Returns the newest tenants for a list of suggestions; a tenant's own viewer needs none."""
    if not viewer.sees_all:
        return []
    found = await viewer.get("/v1/organization/projects", limit=MAX_TENANTS)
    return list(found["data"])


async def tenant_names(viewer: Viewer) -> Mapping[str, str]:
    """Returns the names of the newest tenants by their ids."""
    return names_of(await tenants(viewer))


def names_of(tenants: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    return {one["id"]: one["name"] for one in tenants}


def named(rows: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the rows with the names of their tenants, for the column `TENANT`."""
    return [{**row, "tenant": names.get(row.get("project_id") or "", row.get("project_id"))} for row in rows]


def tenant_page(row: Mapping[str, Any]) -> str | None:
    """Returns the address of the page of a row's tenant."""
    is_tenant = str(row["project_id"]).startswith("proj_")
    return f"/console/tenants/{quote(row['project_id'], safe='')}" if is_tenant else None


TENANT = Column("tenant", "Tenant", link=tenant_page, names_tenant=True)
TENANT_ID = Column("project_id", "Tenant id", "code", names_tenant=True)
"""It stands last in tables with `TENANT`, so that an export has the id too."""


def columns_for(viewer: Viewer, columns: Iterable[Column]) -> Sequence[Column]:
    """Returns the columns that this viewer's table has."""
    return [column for column in columns if viewer.sees_all or not column.names_tenant]


def asked(request: web.Request, names: Iterable[str]) -> dict[str, Any]:
    """Returns the filters of a page's address that are filled in."""
    return {name: request.query[name] for name in names if request.query.get(name)}


def number(text: str | None) -> int | str | None:
    """Returns the number; None where nothing was filled in. What is no number stays text, which the API refuses."""
    if not text:
        return None
    return int(text) if _DIGITS.fullmatch(text) else text


def entries(text: str | None) -> list[str]:
    """Returns what stands on the lines of a text or between its commas."""
    return [one.strip() for one in re.split(r"[\n,]", text or "") if one.strip()]
