"""The SQL side of rebuilding the limiter: incidents, and which gateway has listed its requests under which epoch.

The module knows ids and integers; the gateway knows the meaning of a running request's detail. Epochs are numbered by
compare and set: if two gateways raise one for the same cause, only one succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import bindparam, delete, exists, func, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from accounting.database.db import among, among_given, given, insert_absent, insert_new, upsert
from accounting.database.driver_selects import select_together
from accounting.limits import budgets
from accounting.tables.limiter_models import LimiterBuilt, LimiterGateway, LimiterIncident, LimiterRunning
from accounting.values.budget_types import Budget
from accounting.values.types import LedgerRow

EVERY_TENANT = (None,)
CHUNK = 500


class Incident(msgspec.Struct, frozen=True):
    epoch: int
    tenant_id: str | None
    raised_at_ms: int


class Running(msgspec.Struct, frozen=True):
    request_id: str
    slot: int
    tenant_id: str
    opened_ms: int
    detail: bytes


# Incidents


_OF_ALL = select(func.max(LimiterIncident.epoch)).where(LimiterIncident.tenant_id.is_(None))
_IS_IN_FORCE = LimiterIncident.epoch >= func.coalesce(_OF_ALL.scalar_subquery(), 0)
_NEWEST = select(func.max(LimiterIncident.epoch)).where(_IS_IN_FORCE).group_by(LimiterIncident.tenant_id)
_IN_ORDER = select(LimiterIncident.__table__).order_by(LimiterIncident.epoch)
_IN_FORCE = _IN_ORDER.where(LimiterIncident.epoch.in_(_NEWEST))
_SINCE = _IN_ORDER.where(LimiterIncident.epoch >= bindparam("epoch"))
_EPOCHS = (
    select(LimiterIncident.tenant_id, func.max(LimiterIncident.epoch))
    .where(_IS_IN_FORCE)
    .group_by(LimiterIncident.tenant_id)
)


async def incidents(conn: AsyncConnection, since: int = 0) -> list[Incident]:
    """Returns the incidents from the epoch `since` on, in order. Without it they are those in force: the newest of each
    tenant, for there is one for each charge that was ever taken back, after the last incident of every tenant."""
    (rows,) = await select_together(conn, {"epoch": since}, _SINCE if since else _IN_FORCE)
    return [Incident(row.epoch, row.tenant_id, row.raised_at_ms) for row in rows]


async def epochs(conn: AsyncConnection) -> dict[str | None, int]:
    """Returns the epoch in force of all tenants, under None, and of each that had an incident of its own since."""
    return {row[0]: int(row[1]) for row in await conn.execute(_EPOCHS)}


async def raise_for_life(conn: AsyncConnection, life: str, now_ms: int) -> None:
    """Raises an incident for every tenant, as Redis' data is new and everything is lost. It is raised once for each
    life of the data."""
    known = select(LimiterIncident.epoch).where(LimiterIncident.life == life, LimiterIncident.tenant_id.is_(None))
    while await conn.scalar(known) is None:
        await _raise(conn, await _last(conn), EVERY_TENANT, life, now_ms)


async def raise_for_tenants(conn: AsyncConnection, damaged: Mapping[str, int], now_ms: int, above: int = 0) -> None:
    """Raises an incident for each tenant whose state, built under the given epoch, is damaged. A tenant that has a
    newer incident already gets none. Their numbers are greater than `above`."""
    query = select(LimiterIncident.tenant_id, func.max(LimiterIncident.epoch)).where(
        or_(LimiterIncident.tenant_id.is_(None), among(conn, LimiterIncident.tenant_id, damaged))
    )
    found = await conn.execute(query.group_by(LimiterIncident.tenant_id))
    newest = {row.tenant_id: int(row[1]) for row in found}
    of_all = newest.pop(None, 0)
    due = [tenant_id for tenant_id, epoch in sorted(damaged.items()) if max(of_all, newest.get(tenant_id, 0)) == epoch]
    await _raise(conn, max(await _last(conn), above), due, None, now_ms)


async def raise_for_reversals(conn: AsyncConnection, reversals: Sequence[LedgerRow], now_ms: int) -> None:
    """Raises incidents in the transaction that takes charges back: the budget is free again once its tenant's state is
    rebuilt. Tenants without such a budget get none."""
    of_tenants = await budgets.of_tenants(conn, {row["tenant_id"] for row in reversals})
    due = {row["tenant_id"] for row in reversals if _is_budgeted(row, of_tenants)}
    while due:
        due -= await _raise(conn, await _last(conn), sorted(due), None, now_ms)


def _is_budgeted(row: LedgerRow, of_tenants: Mapping[str, Sequence[Budget]]) -> bool:
    return row["charge"] != 0 and any(
        budget.binds(row["key_id"], row["model"], row["tier"]) and budget.period_at(row["opened_at_ms"]) is not None
        for budget in of_tenants.get(row["tenant_id"], ())
    )


async def _last(conn: AsyncConnection) -> int:
    return await conn.scalar(select(func.max(LimiterIncident.epoch))) or 0


async def _raise(
    conn: AsyncConnection, last: int, tenant_ids: Sequence[str | None], life: str | None, now_ms: int
) -> set[str | None]:
    """Returns the tenants for which an incident was raised. If somebody else has taken a number meanwhile, that one
    stays and the caller reads again."""
    rows = [
        {"epoch": epoch, "tenant_id": tenant_id, "life": life, "raised_at_ms": now_ms}
        for epoch, tenant_id in enumerate(tenant_ids, last + 1)
    ]
    raised = await insert_new(conn, LimiterIncident.__table__, rows, (LimiterIncident.tenant_id,))
    return {row.tenant_id for row in raised}


async def raise_for_all(conn: AsyncConnection, now_ms: int, above: int = 0) -> None:
    """Raises an incident for every tenant. Its number is greater than `above`."""
    while not await _raise(conn, max(await _last(conn), above), EVERY_TENANT, None, now_ms):
        pass  # somebody else has taken the number


# Gateways and their running requests


async def join(conn: AsyncConnection, slot: int, now_ms: int) -> int:
    """Registers a gateway that starts and has no running requests. Requests of its slot's last process are in the
    ledger by now. If that process missed an epoch, states were built without those charges, so everything is built
    again."""
    last = await _last(conn)
    listed = await conn.scalar(select(LimiterGateway.epoch).where(LimiterGateway.slot == slot))
    if listed is not None and listed < last:
        await raise_for_all(conn, now_ms)
        last = await _last(conn)
    await _mark_listed(conn, slot, last, now_ms)
    return last


async def leave(conn: AsyncConnection, slot: int) -> None:
    """Removes a gateway that has ended all of its requests."""
    await conn.execute(delete(LimiterGateway).where(LimiterGateway.slot == slot))


async def list_running(
    conn: AsyncConnection, slot: int, epoch: int, held: Sequence[Running], now_ms: int, late_ms: int
) -> bool:
    """Lists the requests that this gateway runs as it learns of `epoch`. Returns False if the list comes so late that
    others may have built states without it; then a further epoch is raised, for which it must list again."""
    first = select(func.min(LimiterIncident.raised_at_ms)).where(
        LimiterIncident.epoch <= epoch,
        LimiterIncident.epoch > select(LimiterGateway.epoch).where(LimiterGateway.slot == slot).scalar_subquery(),
    )
    raised_at_ms = await conn.scalar(first)
    rows = [{"epoch": epoch, **msgspec.structs.asdict(one)} for one in held]
    await conn.execute(delete(LimiterRunning).where(LimiterRunning.slot == slot))
    for start in range(0, len(rows), CHUNK):
        await conn.execute(insert(LimiterRunning), rows[start : start + CHUNK])
    await _mark_listed(conn, slot, epoch, now_ms)
    is_late = raised_at_ms is not None and now_ms - raised_at_ms > late_ms
    if is_late and rows:
        await raise_for_all(conn, now_ms)
        return False
    return True


async def slots(conn: AsyncConnection) -> set[int]:
    """Returns the slots of gateways that run, or that died without removing their row."""
    return set(await conn.scalars(select(LimiterGateway.slot)))


async def num_unlisted(conn: AsyncConnection, epoch: int) -> int:
    """Returns the number of gateways that have not listed their requests yet."""
    behind = select(func.count()).select_from(LimiterGateway).where(LimiterGateway.epoch < epoch)
    return await conn.scalar(behind) or 0


async def claimed(conn: AsyncConnection, epochs: Mapping[str, int]) -> set[str]:
    """Returns those tenants whose state under the given epoch, or under a later one, somebody claimed to build."""
    (found,) = await select_together(conn, given(conn, epochs), _built(conn.dialect.name))
    return {tenant_id for tenant_id, epoch in found if epoch >= epochs[tenant_id]}


@cache
def _built(dialect: str) -> Any:
    built = LimiterBuilt
    query = select(built.tenant_id, func.max(built.epoch)).where(among_given(dialect, built.tenant_id))
    return query.group_by(built.tenant_id)


async def keep_claims(conn: AsyncConnection, claims: Sequence[tuple[str, int]], slot: int, now_ms: int) -> None:
    """Keeps claims, each of a tenant under an epoch. Of each tenant only the newest stays."""
    rows = [
        {"tenant_id": tenant_id, "epoch": epoch, "slot": slot, "claimed_at_ms": now_ms}
        for tenant_id, epoch in sorted(claims)
    ]
    await insert_absent(conn, LimiterBuilt.__table__, rows)
    of_these = given(conn, {tenant_id for tenant_id, _ in claims})
    await conn.execute(_deleting_older(conn.dialect.name), of_these)


@cache
def _deleting_older(dialect: str) -> Any:
    newer = aliased(LimiterBuilt)
    is_old = exists().where(newer.tenant_id == LimiterBuilt.tenant_id, newer.epoch > LimiterBuilt.epoch)
    return delete(LimiterBuilt).where(among_given(dialect, LimiterBuilt.tenant_id), is_old)


async def _mark_listed(conn: AsyncConnection, slot: int, epoch: int, now_ms: int) -> None:
    values = {"epoch": epoch, "listed_at_ms": now_ms}
    statement = upsert(conn, LimiterGateway.__table__).values(slot=slot, **values)
    await conn.execute(statement.on_conflict_do_update(index_elements=["slot"], set_=values))
