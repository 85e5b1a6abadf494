"""The file in which `headgate up` describes what runs, as soon as a request would succeed."""

from __future__ import annotations

from typing import Any

import msgspec


class Ready(msgspec.Struct, frozen=True):
    """The content of the ready file."""

    base_url: str
    socket: str
    """The unix socket on which this machine's own programs call the base URL where that has TLS; empty if it has none."""
    admin_key: str
    tenant_id: str
    api_key: str
    model: str
    """The first model."""
    model_path: str
    models: dict[str, dict[str, Any]]
    """Every model: its path, and the slots of its workers."""
    pids: dict[str, list[int] | int | None]
    processes: dict[str, int]
    """The process id of every process by its name, such as `gateway-0`."""
    metrics: dict[str, list[str]]
    """URLs by kind: one for all gateways, one for each worker, one for the jobs process."""
