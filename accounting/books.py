"""The equations of metering.md section 13 that SQL alone can state, checked over everything. Writes nothing.

Run it on one snapshot (`Database.read`). Requests that still run, or whose journal is not replayed yet, are named by
the caller in `running`: for them a missing half is no failure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Select, and_, case, func, literal, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batch_models import Batch
from accounting.legs import COUNTED, TOKENS
from accounting.models import ApiKey, EngineRecordRow, LedgerEntry, LedgerLeg, Tenant
from accounting.rollups import KEYS, SECONDS, SUMS, TABLES, Width
from accounting.types import OPERATOR_TENANT, BooksReport, EquationResult

MAX_FAILURES = 100
"""Named per equation; one is enough to stop, a hundred are enough to see a pattern."""

ENDING = LedgerEntry.kind.in_(("settle", "void"))


async def verify(conn: AsyncConnection, *, running: Collection[str] = ()) -> BooksReport:
    skip = frozenset(running)
    return BooksReport(
        (
            await _conservation(conn, skip),
            await _balance(conn),
            await _one_ending(conn, skip),
            await _within_reservation(conn),
            await _rollup_truth(conn),
            await _tenancy_closed(conn),
        )
    )


async def _conservation(conn: AsyncConnection, skip: frozenset[str]) -> EquationResult:
    """Per request and class, so per tenant too: posted + written off - counted by the engine == 0."""
    ledger = select(
        LedgerEntry.request_id, *(getattr(LedgerEntry, name).label(name) for name in COUNTED)
    )
    engine = select(
        EngineRecordRow.request_id,
        *((-getattr(EngineRecordRow, name)).label(name) for name in COUNTED),
    )
    both = union_all(ledger, engine).subquery()
    wrong = _not_zero(both, ["request_id"], COUNTED)
    return EquationResult(
        "I1",
        "conservation",
        await _count(conn, select(both.c.request_id).distinct()),
        await _names(conn, wrong, skip),
    )


async def _balance(conn: AsyncConnection) -> EquationResult:
    """Debits == credits per unit, and the legs say what their entry says."""
    event = (LedgerLeg.request_id, LedgerLeg.kind, LedgerLeg.attempt)
    unbalanced = (
        select(LedgerLeg.request_id)
        .group_by(*event, LedgerLeg.unit)
        .having(func.sum(LedgerLeg.amount) != 0)
    )
    tokens = sum((getattr(LedgerEntry, name) for name in COUNTED[1:]), LedgerEntry.cache_read)
    entries = select(
        LedgerEntry.request_id, LedgerEntry.kind, LedgerEntry.attempt,
        tokens.label("tokens"), LedgerEntry.charge.label("money"),
    )  # fmt: skip
    debit = case((LedgerLeg.amount > 0, -LedgerLeg.amount), else_=0)
    booked = select(
        *event,
        case((LedgerLeg.unit == TOKENS, debit), else_=0).label("tokens"),
        case((LedgerLeg.unit != TOKENS, debit), else_=0).label("money"),
    )
    both = union_all(entries, booked).subquery()
    differing = _not_zero(both, ["request_id", "kind", "attempt"], ("tokens", "money"))
    failures = await _names(conn, unbalanced) + await _names(conn, differing)
    num_checked = await _count(conn, select(LedgerEntry.request_id))
    return EquationResult("I2", "balance", num_checked, tuple(dict.fromkeys(failures)))


async def _one_ending(conn: AsyncConnection, skip: frozenset[str]) -> EquationResult:
    """Whatever the engine worked on has ended, exactly once."""
    endings = select(
        LedgerEntry.request_id,
        case((ENDING, 1), else_=0).label("endings"),
        literal(0).label("seen"),
    )
    seen = select(EngineRecordRow.request_id, literal(0).label("endings"), literal(1).label("seen"))
    both = union_all(endings, seen).subquery()
    wrong = (
        select(both.c.request_id).group_by(both.c.request_id).having(func.sum(both.c.endings) != 1)
    )
    return EquationResult(
        "I4",
        "one ending",
        await _count(conn, select(both.c.request_id).distinct()),
        await _names(conn, wrong, skip),
    )


async def _within_reservation(conn: AsyncConnection) -> EquationResult:
    """A settle costs at most what was reserved; everything else costs nothing."""
    too_much = or_(
        LedgerEntry.charge > LedgerEntry.reserved,
        and_(LedgerEntry.kind != "settle", LedgerEntry.charge != 0),
    )
    num_checked = await _count(conn, select(LedgerEntry.request_id))
    wrong = select(LedgerEntry.request_id).where(too_much)
    return EquationResult("I5", "within reservation", num_checked, await _names(conn, wrong))


async def _rollup_truth(conn: AsyncConnection) -> EquationResult:
    """Minute, hour and day sums == sums of rows, key by key."""
    num_checked = 0
    failures: list[str] = []
    for width in TABLES:
        both = union_all(_rollup_of_rows(width), _rollup_negated(width)).subquery()
        keys = ["bucket", *KEYS]
        wrong = _not_zero(both, keys, ("num_requests", *SUMS), columns=keys)
        rows = (await conn.execute(wrong.limit(MAX_FAILURES))).all()
        failures += [f"{width} bucket {row.bucket}: {', '.join(map(str, row[1:]))}" for row in rows]
        num_checked += await _count(conn, select(TABLES[width].bucket))
    return EquationResult("I8", "rollup truth", num_checked, tuple(failures))


def _rollup_of_rows(width: Width) -> Select[Any]:
    seconds = SECONDS[width]
    return select(
        ((LedgerEntry.opened_at_ms // (1000 * seconds)) * seconds).label("bucket"),
        *(getattr(LedgerEntry, name) for name in KEYS),
        literal(1).label("num_requests"),
        *(getattr(LedgerEntry, name) for name in SUMS),
    ).where(LedgerEntry.kind == "settle")


def _rollup_negated(width: Width) -> Select[Any]:
    table = TABLES[width]
    return select(
        table.bucket,
        *(getattr(table, name) for name in KEYS),
        *((-getattr(table, name)).label(name) for name in ("num_requests", *SUMS)),
    )


async def _tenancy_closed(conn: AsyncConnection) -> EquationResult:
    """No row without a tenant, and no reference from one tenant's row to another's key, batch or engine record."""
    orphan = select(LedgerEntry.request_id).where(LedgerEntry.tenant_id.not_in(select(Tenant.id)))
    stray_record = select(EngineRecordRow.request_id).where(
        EngineRecordRow.tenant_id.not_in(select(Tenant.id))
    )
    # Warm-up has no key, so the operator's rows may name none.
    foreign_key = (
        select(LedgerEntry.request_id)
        .outerjoin(
            ApiKey, and_(ApiKey.id == LedgerEntry.key_id, ApiKey.tenant_id == LedgerEntry.tenant_id)
        )
        .where(ApiKey.id.is_(None), LedgerEntry.tenant_id != OPERATOR_TENANT)
    )
    foreign_batch = select(LedgerEntry.request_id).join(Batch, Batch.id == LedgerEntry.batch_id).where(
        or_(Batch.tenant_id != LedgerEntry.tenant_id, Batch.key_id != LedgerEntry.key_id)
    )  # fmt: skip
    foreign_record = (
        select(LedgerEntry.request_id)
        .join(EngineRecordRow, EngineRecordRow.request_id == LedgerEntry.request_id)
        .where(EngineRecordRow.tenant_id != LedgerEntry.tenant_id)
    )
    failures: dict[str, None] = {}
    for wrong in (orphan, stray_record, foreign_key, foreign_batch, foreign_record):
        failures |= dict.fromkeys(await _names(conn, wrong.distinct()))
    num_checked = await _count(conn, select(LedgerEntry.request_id))
    return EquationResult("I15", "tenancy closed", num_checked, tuple(sorted(failures)))


def _not_zero(
    both: Any, keys: list[str], sums: Collection[str], columns: Collection[str] = ("request_id",)
) -> Select[Any]:
    """Groups in which the two signed halves do not cancel out."""
    return (
        select(*(both.c[name] for name in columns))
        .group_by(*(both.c[name] for name in keys))
        .having(or_(*(func.sum(both.c[name]) != 0 for name in sums)))
    )


async def _names(
    conn: AsyncConnection, wrong: Select[Any], skip: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    query = wrong.limit(MAX_FAILURES + len(skip))
    found = [name for name in (await conn.execute(query)).scalars() if name not in skip]
    return tuple(sorted(found)[:MAX_FAILURES])


async def _count(conn: AsyncConnection, query: Select[Any]) -> int:
    return await conn.scalar(select(func.count()).select_from(query.subquery())) or 0
