"""OpenAI's spend alerts: an amount of cents (hundredths of the currency) in a UTC month, spent by a tenant or (for the
operator's tenant) by all tenants, and the recipients.

`note_due` writes one row per alert and month; its sender then sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, Select, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import audit
from accounting.database.db import among, insert_new
from accounting.database.paging import Page, newest_first, one, shaped
from accounting.events import events, outbox
from accounting.limits.spend_limits import MICRO_UNITS_PER_CENT, month, spent_by_all
from accounting.prices import prices
from accounting.tables.admin_models import SpendAlert, SpendAlertDue
from accounting.tables.invoice_models import RollupMonth
from accounting.tables.models import Tenant
from accounting.tenants import tenants
from accounting.values.errors import ConflictError
from accounting.values.ids import new_id
from accounting.values.types import OPERATOR_TENANT

MAX_PER_TENANT = 20


class SpendAlertInfo(msgspec.Struct, frozen=True):
    id: str
    tenant_id: str
    cents: int
    recipients: tuple[str, ...]
    subject_prefix: str | None
    created_at: int


class DueAlert(msgspec.Struct, frozen=True):
    alert: SpendAlertInfo
    tenant_name: str
    period_start_ms: int
    spent_micro_units: int
    currency: str

    @property
    def micro_units(self) -> int:
        return self.alert.cents * MICRO_UNITS_PER_CENT


class AlertFields(msgspec.Struct, frozen=True):
    cents: int
    recipients: tuple[str, ...]
    subject_prefix: str | None = None


async def create(conn: AsyncConnection, tenant_id: str, fields: AlertFields, *, now: int, actor: str) -> SpendAlertInfo:
    if tenant_id != OPERATOR_TENANT:
        await tenants.living(conn, tenant_id)
    query = select(func.count(SpendAlert.id)).where(SpendAlert.tenant_id == tenant_id, SpendAlert.deleted_at.is_(None))
    if int(await conn.scalar(query) or 0) >= MAX_PER_TENANT:
        raise ConflictError(f"There are at most {MAX_PER_TENANT} spend alerts.")
    alert_id = new_id("spend_alert")
    await conn.execute(insert(SpendAlert).values(id=alert_id, tenant_id=tenant_id, created_at=now, **_columns(fields)))
    await _record(conn, "created", tenant_id, alert_id, now, actor, fields)
    return await get(conn, tenant_id, alert_id)


async def get(conn: AsyncConnection, tenant_id: str, alert_id: str) -> SpendAlertInfo:
    """Returns an alert of the tenant. Raises NotFoundError, also for another tenant's alert."""
    return _info(await one(conn, _living(tenant_id).where(SpendAlert.id == alert_id), "There is no such spend alert."))


async def list_alerts(
    conn: AsyncConnection, tenant_id: str, *, after: str | None = None, limit: int = 20, oldest_first: bool = False
) -> Page[SpendAlertInfo]:
    query, ever = _living(tenant_id), select(SpendAlert.__table__).where(SpendAlert.tenant_id == tenant_id)
    page = await newest_first(conn, query, SpendAlert, after, limit, ever=ever, oldest_first=oldest_first)
    return page.of(_info)


async def change(
    conn: AsyncConnection, tenant_id: str, alert_id: str, fields: AlertFields, *, now: int, actor: str
) -> SpendAlertInfo:
    await get(conn, tenant_id, alert_id)
    await conn.execute(update(SpendAlert).where(SpendAlert.id == alert_id).values(**_columns(fields)))
    await _record(conn, "updated", tenant_id, alert_id, now, actor, fields)
    return await get(conn, tenant_id, alert_id)


async def delete(conn: AsyncConnection, tenant_id: str, alert_id: str, *, now: int, actor: str) -> None:
    await get(conn, tenant_id, alert_id)
    await conn.execute(update(SpendAlert).where(SpendAlert.id == alert_id).values(deleted_at=now))
    await _record(conn, "deleted", tenant_id, alert_id, now, actor, None)


async def any_due(conn: AsyncConnection, now_ms: int) -> bool:
    """Says whether `note_due` would find an alert."""
    due = set(await _due(conn, now_ms))
    if not due:
        return False
    of_month = SpendAlertDue.period_start_ms == month(now_ms).start_ms
    noted = select(SpendAlertDue.alert_id).where(of_month, among(conn, SpendAlertDue.alert_id, due))
    return not due <= set((await conn.scalars(noted)).all())


async def note_due(conn: AsyncConnection, now_ms: int) -> list[DueAlert]:
    """Writes the alerts whose threshold is passed and that nobody noted this month. Of several callers only one gets
    each."""
    due = await _due(conn, now_ms)
    rows = [
        {
            "alert_id": alert_id,
            "period_start_ms": found.period_start_ms,
            "cents": found.alert.cents,
            "spent_micro_units": found.spent_micro_units,
            "at_ms": now_ms,
            "sent_at_ms": None,
        }
        for alert_id, found in due.items()
    ]
    new = await insert_new(conn, SpendAlertDue.__table__, rows, (SpendAlertDue.alert_id,))
    noted = [due[row.alert_id] for row in new]
    await outbox.write(conn, [_event(one, now_ms) for one in noted])
    return noted


def _event(due: DueAlert, now_ms: int) -> events.Event:
    return events.spend_alert(
        due.alert.id,
        due.alert.tenant_id,
        (due.micro_units, due.spent_micro_units),
        due.currency,
        due.period_start_ms,
        now_ms,
    )


async def _due(conn: AsyncConnection, now_ms: int) -> dict[str, DueAlert]:
    """Returns all alerts whose threshold is passed, by id."""
    period = month(now_ms)
    query = (
        select(SpendAlert.__table__, Tenant.name)
        .join(Tenant, Tenant.id == SpendAlert.tenant_id)
        .where(SpendAlert.deleted_at.is_(None))
    )
    rows = (await conn.execute(query)).all()
    if not rows:
        return {}
    of_month = select(RollupMonth.tenant_id, func.sum(RollupMonth.charge).label("charge")).where(
        RollupMonth.bucket == period.start_ms // 1000,
        among(conn, RollupMonth.tenant_id, {row.tenant_id for row in rows}),
    )
    spent = {row.tenant_id: int(row.charge) for row in await conn.execute(of_month.group_by(RollupMonth.tenant_id))}
    currencies = await prices.currencies(conn, {OPERATOR_TENANT, *(row.tenant_id for row in rows)}, now_ms)
    if any(row.tenant_id == OPERATOR_TENANT for row in rows):
        spent[OPERATOR_TENANT] = await spent_by_all(conn, period, currencies[OPERATOR_TENANT])
    due: dict[str, DueAlert] = {}
    for row in rows:
        used = spent.get(row.tenant_id, 0)
        if used >= row.cents * MICRO_UNITS_PER_CENT:
            due[row.id] = DueAlert(_info(row), row.name, period.start_ms, used, currencies[row.tenant_id])
    return due


async def sent(conn: AsyncConnection, due: DueAlert, now_ms: int) -> None:
    await conn.execute(
        update(SpendAlertDue)
        .where(SpendAlertDue.alert_id == due.alert.id, SpendAlertDue.period_start_ms == due.period_start_ms)
        .values(sent_at_ms=now_ms)
    )


def _living(tenant_id: str) -> Select[tuple[object, ...]]:
    mine = SpendAlert.tenant_id == tenant_id
    return select(SpendAlert.__table__).where(mine, SpendAlert.deleted_at.is_(None))


def _columns(fields: AlertFields) -> dict[str, int | Sequence[str] | str | None]:
    return {"cents": fields.cents, "recipients": list(fields.recipients), "subject_prefix": fields.subject_prefix}


def _info(row: Row[Any]) -> SpendAlertInfo:
    return shaped(SpendAlertInfo, row, recipients=tuple(row.recipients))


async def _record(
    conn: AsyncConnection, verb: str, tenant_id: str, alert_id: str, now: int, actor: str, fields: AlertFields | None
) -> None:
    """Audits a change. The recipients are addresses of persons: they are not kept in a log that nobody can edit."""
    detail = {} if fields is None else {"threshold_amount": fields.cents, "num_recipients": len(fields.recipients)}
    await audit.record(
        conn,
        f"headgate.spend_alert.{verb}",
        actor=actor,
        now=now,
        object_id=alert_id,
        detail=detail,
        tenant_id=None if tenant_id == OPERATOR_TENANT else tenant_id,
    )
