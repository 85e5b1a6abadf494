"""The equation over price versions: I23 (price in force). It reads the intervals of versions and of assignments as they
were known when a request opened. The module writes nothing.
"""

from __future__ import annotations

from sqlalchemy import CTE, BigInteger, ColumnElement, Select, Text, and_, case, cast, exists, func, not_, or_, select
from sqlalchemy.orm import aliased

from accounting.prices.prices import ASSIGNED, DEFAULT_SHEET, FOR_EVER
from accounting.tables.models import AuditLog, LedgerEntry, PriceAssignment, PriceSheetVersion

LATE_MS = 900_000
"""The time for which a request may still open at a price that has ended. A quote binds a price for a minute, and while
SQL does not answer a gateway goes on for 10 minutes with the keys and prices that it knows."""

_OPENED = LedgerEntry.opened_at_ms


def not_in_force(settles: Select[str]) -> Select[str]:
    """Selects of these ledger rows those that are priced by no version, by one that was not in force when the request
    opened, or by one of a sheet that the tenant did not pay by."""
    version = _versions()
    in_time = and_(version.c.from_ms <= _OPENED, version.c.ended_ms > _OPENED)
    # Most rows are right by the first condition or the second, and the lookups in the audit log come last.
    pays_by_it = or_(_is_assigned(version.c.sheet_id), and_(version.c.sheet_id == DEFAULT_SHEET, ~_has_own_sheet()))
    wrong = or_(version.c.name.is_(None), not_(in_time), not_(pays_by_it))
    return settles.outerjoin(version, version.c.name == LedgerEntry.price_version).where(wrong)


def _versions() -> CTE:
    """Selects all versions by their names. A version whose successor was given back-dated was in force until the
    successor was known."""
    this, successor = aliased(PriceSheetVersion), aliased(PriceSheetVersion)
    follows = and_(
        successor.sheet_id == this.sheet_id, successor.version == this.version + 1, successor.from_ms == this.until_ms
    )
    until_ms, known_ms = func.coalesce(this.until_ms, FOR_EVER), successor.created_at * 1000
    ended_ms = case((known_ms > until_ms, known_ms), else_=until_ms) + LATE_MS
    query = select(
        cast(this.sheet_id + "@" + cast(this.version, Text), Text).label("name"),
        this.sheet_id,
        this.from_ms,
        ended_ms.label("ended_ms"),
    ).outerjoin(successor, follows)
    # SQLite gives it an index by name: for that it is materialized, and the name is of a type.
    return query.cte("version").prefix_with("MATERIALIZED")


def _is_assigned(sheet_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Returns the condition that the tenant was assigned the sheet when the request opened."""
    this, successor = aliased(PriceAssignment), aliased(PriceAssignment)
    follows = and_(successor.tenant_id == this.tenant_id, successor.from_ms == this.until_ms)
    known_late = exists().where(follows, _recorded_ms(successor) + LATE_MS > _OPENED).correlate_except(successor)
    has_not_ended = or_(this.until_ms.is_(None), this.until_ms + LATE_MS > _OPENED, known_late)
    is_his = and_(this.tenant_id == LedgerEntry.tenant_id, this.sheet_id == sheet_id)
    return exists().where(is_his, this.from_ms <= _OPENED, has_not_ended).correlate_except(this)


def _has_own_sheet() -> ColumnElement[bool]:
    """Returns the condition that the tenant had a sheet of its own when the request opened, and for long enough that
    every gateway knew it."""
    this = aliased(PriceAssignment)
    covers = and_(this.from_ms + LATE_MS <= _OPENED, or_(this.until_ms.is_(None), this.until_ms > _OPENED))
    was_known = func.coalesce(_recorded_ms(this), 0) + LATE_MS <= _OPENED
    return exists().where(this.tenant_id == LedgerEntry.tenant_id, covers, was_known).correlate_except(this)


def _recorded_ms(assignment: type[PriceAssignment]) -> ColumnElement[int]:
    """Returns when the audit log got the assignment; NULL if it did not."""
    table = AuditLog
    # Other events have other details: CASE keeps theirs from the cast.
    since = case((table.event == ASSIGNED, cast(table.detail["from"].as_string(), BigInteger)))
    recorded = select(func.min(table.at_ms)).where(
        table.tenant_id == assignment.tenant_id,
        table.object_id == assignment.sheet_id,
        since * 1000 == assignment.from_ms,
    )
    return recorded.correlate(assignment).scalar_subquery()
