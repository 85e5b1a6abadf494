"""An entry of the audit log in OpenAI's shape: the details stand under the name of the event. Shapes only."""

from __future__ import annotations

from typing import Any

from accounting.database.audit import AuditEntry

_DETAILS = {"created": "data", "updated": "changes_requested"}
"""By the event's last word, where OpenAI puts what was asked for; in other events it stands beside the id."""


def entry(found: AuditEntry) -> dict[str, Any]:
    value: dict[str, Any] = {
        "id": found.id,
        "object": "organization.audit_log",
        "type": found.type,
        "effective_at": found.at,
        "actor": _actor(found),
    }
    if found.tenant_id is not None:
        value["project"] = {"id": found.tenant_id, "name": found.tenant_name}
    field = _DETAILS.get(found.type.rpartition(".")[2])
    details = found.detail if field is None else {field: found.detail}
    return value | {found.type: {"id": found.object_id, **details}}


def _actor(found: AuditEntry) -> dict[str, Any]:
    """What no key did was done at the command line, or by Headgate itself."""
    if not found.actor.startswith("key_"):
        return {"type": "session", "session": {"user": {"id": found.actor}}}
    key: dict[str, Any] = {"id": found.actor, "type": "service_account"}
    if found.actor_account is not None:
        key["service_account"] = {"id": found.actor_account}
    return {"type": "api_key", "api_key": key}
