"""The audit log: one row per change, written in the change's own transaction and never edited (a trigger refuses it).

Rows name the actor, the change, the object and the requested values, and never a secret. Entries are read newest
first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec
from sqlalchemy import Row, Select, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.paging import Page, shaped
from accounting.tables.models import ApiKey, AuditLog, Tenant
from accounting.values.errors import InvalidError

ID_PREFIX = "audit_log-"
Comparison = Literal["gt", "gte", "lt", "lte"]
_WRITTEN = insert(AuditLog)


class AuditEntry(msgspec.Struct, frozen=True):
    id: str
    at: int
    """The time in Unix seconds."""
    type: str
    actor: str
    """A key id, `cli` or `system`."""
    actor_account: str | None
    """The service account of the acting key."""
    tenant_id: str | None
    tenant_name: str | None
    object_id: str | None
    detail: dict[str, Any]


class AuditFilter(msgspec.Struct, frozen=True):
    """The entries to read. A field of None does not filter."""

    types: Collection[str] | None = None
    tenant_ids: Collection[str] | None = None
    actors: Collection[str] | None = None
    object_ids: Collection[str] | None = None
    at: tuple[tuple[Comparison, int], ...] = ()
    """Bounds on the time in Unix seconds; all must hold."""


async def record(
    conn: AsyncConnection,
    event: str,
    *,
    actor: str,
    now: int,
    tenant_id: str | None = None,
    object_id: str | None = None,
    detail: dict[str, Any] | None = None,
) -> None:
    """Writes a row for a change that authentication need not notice. `auth_epoch.record` is for the other changes."""
    row = {"at_ms": now * 1000, "actor": actor, "event": event, "tenant_id": tenant_id, "object_id": object_id}
    await conn.execute(_WRITTEN, {**row, "detail": detail or {}})


async def list_entries(
    conn: AsyncConnection, wanted: AuditFilter, *, after: str | None = None, before: str | None = None, limit: int = 20
) -> Page[AuditEntry]:
    """Returns a page of entries. `after` and `before` are ids of entries; a page towards `before` ends next to that
    entry."""
    query = _entries(wanted)
    if after is not None:
        query = query.where(AuditLog.id < _number(after, "after"))
    backwards = before is not None and after is None
    if before is not None:
        query = query.where(AuditLog.id > _number(before, "before"))
    order = AuditLog.id.asc() if backwards else AuditLog.id.desc()
    rows = (await conn.execute(query.order_by(order).limit(limit + 1))).all()
    page = rows[:limit]
    return Page([_entry(row) for row in (reversed(page) if backwards else page)], len(rows) > limit)


def _entries(wanted: AuditFilter) -> Select[Any]:
    query = (
        select(AuditLog.__table__, Tenant.name.label("tenant_name"), ApiKey.service_account_id.label("actor_account"))
        .outerjoin(Tenant, Tenant.id == AuditLog.tenant_id)
        .outerjoin(ApiKey, ApiKey.id == AuditLog.actor)
    )
    for column, values in (
        (AuditLog.event, wanted.types),
        (AuditLog.tenant_id, wanted.tenant_ids),
        (AuditLog.actor, wanted.actors),
        (AuditLog.object_id, wanted.object_ids),
    ):
        if values is not None:
            query = query.where(column.in_(values))
    for comparison, second in wanted.at:
        query = query.where(_bound(comparison, second))
    return query


def _bound(comparison: Comparison, second: int) -> Any:
    """Returns a bound on whole seconds that ignores the milliseconds."""
    if comparison == "gt":
        return AuditLog.at_ms >= (second + 1) * 1000
    if comparison == "gte":
        return AuditLog.at_ms >= second * 1000
    if comparison == "lt":
        return AuditLog.at_ms < second * 1000
    return AuditLog.at_ms < (second + 1) * 1000


def _number(entry_id: str, param: str) -> int:
    digits = entry_id.removeprefix(ID_PREFIX)
    if not entry_id.startswith(ID_PREFIX) or not digits.isdecimal() or len(digits) > 18:
        raise InvalidError(f"The object named in '{param}' does not exist.", param)
    return int(digits)


def _entry(row: Row[Any]) -> AuditEntry:
    return shaped(AuditEntry, row, id=f"{ID_PREFIX}{row.id}", at=row.at_ms // 1000, type=row.event)
