"""An entry of the audit log in OpenAI's shape: the details are in a field named like the event. The module holds
shapes only.
"""

from __future__ import annotations

from typing import Any

from accounting.database.audit import AuditEntry

_DETAILS = {"created": "data", "updated": "changes_requested"}
"""The last word of an event → the field in which OpenAI puts the requested values. In other events they are next to the
id.
"""


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
    """Returns the actor. A change without a key was made at the command line, or by Headgate itself."""
    if not found.actor.startswith("key_"):
        return {"type": "session", "session": {"user": {"id": found.actor}}}
    key: dict[str, Any] = {"id": found.actor, "type": "service_account"}
    if found.actor_account is not None:
        key["service_account"] = {"id": found.actor_account}
    return {"type": "api_key", "api_key": key}
