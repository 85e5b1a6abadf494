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

PROJECTS = "/v1/organization/projects"
MAX_TENANTS = 100
_DIGITS = re.compile(r"-?[0-9]{1,18}", re.ASCII)


async def tenants(viewer: Viewer) -> Sequence[Mapping[str, Any]]:
    """Returns the newest tenants for a list of suggestions; a tenant's own viewer needs none."""
    if not viewer.sees_all:
        return []
    found = await viewer.get(PROJECTS, limit=MAX_TENANTS)
    return list(found["data"])


async def names_of(viewer: Viewer, ids: Iterable[str | None]) -> Mapping[str, str]:
    """Returns the names of these tenants by their ids, archived ones included; none for a tenant's own viewer."""
    wanted = sorted({one for one in ids if one}) if viewer.sees_all else []
    found: dict[str, str] = {}
    for start in range(0, len(wanted), MAX_TENANTS):
        page = await viewer.get(
            PROJECTS, limit=MAX_TENANTS, include_archived="true", ids=wanted[start : start + MAX_TENANTS]
        )
        found |= {one["id"]: one["name"] for one in page["data"]}
    return found


async def named(viewer: Viewer, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with the names of their tenants, for the column `TENANT`."""
    listed = list(rows)
    names = await names_of(viewer, (row.get("project_id") for row in listed))
    return [{**row, "tenant": names.get(row.get("project_id") or "", row.get("project_id"))} for row in listed]


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
