"""Fields of forms that several screens read: which tenant is meant, numbers that may be blank, a text with one entry a
line. Wrong values go to the API as they are, and its sentence is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    return {one["id"]: one["name"] for one in await tenants(viewer)}


def number(text: str | None) -> int | str | None:
    """Returns the number; None where nothing was filled in. What is no number stays text, which the API refuses."""
    if not text:
        return None
    return int(text) if _DIGITS.fullmatch(text) else text


def entries(text: str | None) -> list[str]:
    """Returns what stands on the lines of a text or between its commas."""
    return [one.strip() for one in re.split(r"[\n,]", text or "") if one.strip()]
