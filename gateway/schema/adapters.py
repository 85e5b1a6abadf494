"""The body and the object of `/admin/v1/adapters`. The module holds shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from accounting.tenants.adapters import AdapterInfo
from gateway.schema import forms
from gateway.schema.convert import OwnBody
from workers.protocol.reports import AdapterState


class NewAdapter(OwnBody, frozen=True):
    model: str
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=forms.ABSOLUTE_PATH)]
    """An absolute path that is valid on every worker's machine."""
    tenant: str | None = None


def adapter(info: AdapterInfo, states: Mapping[str, AdapterState]) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "adapter",
        "model": info.model,
        "name": info.name,
        "served_as": info.served_id,
        "path": info.path,
        "tenant": info.tenant_id,
        "created_at": info.created_at,
        "state": state_of(states),
        "workers": [
            {"worker": worker, "state": one.state, "reason": one.reason or None}
            for worker, one in sorted(states.items())
        ],
    }


def state_of(states: Mapping[str, AdapterState]) -> str:
    """Returns the state over all workers. If there is no worker, the adapter waits to be loaded."""
    found = {one.state for one in states.values()}
    return "failed" if "failed" in found else "loaded" if found == {"loaded"} else "loading"
