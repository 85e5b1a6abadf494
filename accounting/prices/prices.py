"""Price sheets in SQL: versions with half-open intervals, assignments to tenants. The arithmetic is in pricing.py.

A version is immutable. It stays in force until its successor begins; a successor that would begin inside a closed
interval, or not after its predecessor, is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Row,
    Select,
    and_,
    bindparam,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import auth_epoch
from accounting.database.db import insert_new
from accounting.database.driver_selects import select_together
from accounting.prices.pricing import MAX_RATE
from accounting.tables.admin_models import SpendAlert
from accounting.tables.budget_models import BudgetRow
from accounting.tables.invoice_models import Credit, PriceResidency, RollupMonth
from accounting.tables.models import ApiKey, PriceAssignment, PriceRate, PriceSheet, PriceSheetVersion, Tenant
from accounting.tables.residency_models import ResidencyCharge
from accounting.values import clock, texts
from accounting.values.currencies import decimals
from accounting.values.errors import ConflictError, InvalidError, NameTakenError, NotFoundError
from accounting.values.model_names import base_of
from accounting.values.types import OPERATOR_TENANT, TOKEN_CLASSES, Price, Rates, Tier

DEFAULT_SHEET = "standard"
"""The sheet of every tenant without its own assignment."""

DEFAULT_CURRENCY = "USD"

UNPOSTED_S = 900
"""Seconds within which a request of a new tenant may still run, or wait to be posted, at the price of its beginning."""

ASSIGNED = "headgate.price_sheet.assigned"
"""The event of the audit log under which an assignment is recorded. Its detail has the first second as `from`."""

FOR_EVER = 2**62
"""A time later than any other."""

_IS_OF_VERSION = and_(PriceSheetVersion.sheet_id == PriceRate.sheet_id, PriceSheetVersion.version == PriceRate.version)

RateTable = Mapping[tuple[str, Tier], Rates]
ResidencyTable = Mapping[str, tuple[int, int]]
"""Model to micro-units per GB and hour, of the cache and of pinned prefixes."""


async def create_sheet(conn: AsyncConnection, sheet_id: str, currency: str, now: int) -> None:
    if "@" in sheet_id or not sheet_id:
        raise InvalidError("A price sheet needs a name without '@'.", "sheet")
    decimals(currency)
    sheet = {"id": sheet_id, "currency": currency.upper(), "created_at": now}
    if not await insert_new(conn, PriceSheet.__table__, [sheet], (PriceSheet.id,)):
        raise NameTakenError("A price sheet of that name exists.")


async def currency_of(conn: AsyncConnection, sheet_id: str) -> str:
    currency = await conn.scalar(select(PriceSheet.currency).where(PriceSheet.id == sheet_id))
    if currency is None:
        raise NotFoundError(f"There is no price sheet {sheet_id}.")
    return currency


async def add_version(
    conn: AsyncConnection,
    sheet_id: str,
    rates: RateTable,
    from_ms: int,
    until_ms: int | None = None,
    *,
    residency: ResidencyTable | None = None,
    now: int | None = None,
) -> str:
    """Appends `<sheet>@<n>`, in force from `from_ms`. Its predecessor ends there if it had no end. Raises InvalidError,
    NotFoundError, ConflictError."""
    if until_ms is not None and until_ms <= from_ms:
        raise InvalidError("A price must end after it begins.", "until")
    _check_rates(rates)
    # The lock on the sheet's row makes check and insert one step on PostgreSQL; SQLite has one writer anyway.
    locked = select(PriceSheet.id).where(PriceSheet.id == sheet_id).with_for_update()
    if await conn.scalar(locked) is None:
        raise NotFoundError(f"There is no price sheet {sheet_id}.")
    last = await _last_version(conn, sheet_id)
    version = 1 if last is None else last.version + 1
    if last is not None:
        await _end_predecessor(conn, sheet_id, last, from_ms)
    await conn.execute(
        insert(PriceSheetVersion).values(
            sheet_id=sheet_id,
            version=version,
            from_ms=from_ms,
            until_ms=until_ms,
            created_at=from_ms // 1000 if now is None else now,
        )
    )
    await _add_residency(conn, sheet_id, version, residency or {})
    await conn.execute(
        insert(PriceRate),
        [
            {"sheet_id": sheet_id, "version": version, "model": model, "tier": tier, **_columns(rate)}
            for (model, tier), rate in rates.items()
        ],
    )
    await auth_epoch.raised(conn)
    return f"{sheet_id}@{version}"


async def assign(
    conn: AsyncConnection,
    tenant_id: str,
    sheet_id: str,
    from_ms: int,
    until_ms: int | None = None,
    *,
    now_ms: int | None = None,
) -> bool:
    """Makes the tenant pay by that sheet from `from_ms` on. A tenant has one currency for ever: it must pay in the
    sheet's until then, and afterwards. Returns False if it pays by that sheet already. Raises InvalidError,
    NotFoundError, ConflictError."""
    if until_ms is not None and until_ms <= from_ms:
        raise InvalidError("A price must end after it begins.", "until")
    currency = await currency_of(conn, sheet_id)
    # The lock on the tenant's row makes check and insert one step on PostgreSQL.
    tenant = select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True)
    if await conn.scalar(tenant) is None:
        raise NotFoundError("There is no such tenant.")
    if await _currencies(conn, tenant_id) - {currency}:
        raise ConflictError("A tenant has one currency.")
    if now_ms is None:
        now_ms = clock.now_ms()
    until_then = await currency_of_tenant(conn, tenant_id, max(now_ms, from_ms - 1))
    if until_then != currency:
        await _check_nothing_in(conn, tenant_id, until_then, now_ms)
    await _check_without_gap(conn, tenant_id, currency, from_ms, until_ms, now_ms)
    mine = PriceAssignment.tenant_id == tenant_id
    ends = func.coalesce(PriceAssignment.until_ms, FOR_EVER)
    overlapping = select(PriceAssignment.__table__).where(
        mine, ends > from_ms, PriceAssignment.from_ms < (until_ms or FOR_EVER)
    )
    for row in (await conn.execute(overlapping)).all():
        if row.sheet_id == sheet_id and row.from_ms <= from_ms and row.until_ms == until_ms:
            return False
        # An assignment that began before and had no end ends now. Any other overlap is refused.
        if row.until_ms is not None or row.from_ms >= from_ms:
            raise ConflictError("The price interval overlaps with an earlier one.")
        await conn.execute(
            update(PriceAssignment).where(mine, PriceAssignment.from_ms == row.from_ms).values(until_ms=from_ms)
        )
    await conn.execute(
        insert(PriceAssignment).values(tenant_id=tenant_id, sheet_id=sheet_id, from_ms=from_ms, until_ms=until_ms)
    )
    await auth_epoch.raised(conn)
    return True


async def _currencies(conn: AsyncConnection, tenant_id: str) -> set[str]:
    """Returns the currencies of the tenant's own sheets and of its charges."""
    own = (
        select(PriceSheet.currency)
        .join(PriceAssignment, PriceAssignment.sheet_id == PriceSheet.id)
        .where(PriceAssignment.tenant_id == tenant_id)
    )
    charged = select(RollupMonth.currency).where(RollupMonth.tenant_id == tenant_id)
    return {*(await conn.execute(own)).scalars(), *(await conn.execute(charged)).scalars()}


async def _check_without_gap(
    conn: AsyncConnection, tenant_id: str, currency: str, from_ms: int, until_ms: int | None, now_ms: int
) -> None:
    """Raises ConflictError if the tenant would pay in another currency before the interval or after it. Its months could
    not be closed any more."""
    before = [now_ms, from_ms - 1] if from_ms > now_ms else []
    after = [] if until_ms is None else [until_ms]
    for at_ms in before + after:
        other = await currency_of_tenant(conn, tenant_id, at_ms)
        if other != currency:
            raise ConflictError(
                f"A tenant has one currency: this one would pay in {other} before or after. Assign a sheet in "
                f"{currency} from now on and without an end."
            )


async def _check_nothing_in(conn: AsyncConnection, tenant_id: str, currency: str, now_ms: int) -> None:
    """Raises ConflictError if the tenant has anything in the currency that it pays in now, and would not pay in any
    more."""
    amounts = [
        exists().where(table.tenant_id == tenant_id, table.deleted_at.is_(None)) for table in (BudgetRow, SpendAlert)
    ]
    if await conn.scalar(select(or_(*amounts))):
        raise ConflictError(f"The tenant has budgets, limits or alerts in {currency}: delete them first.")
    money = [
        exists().where(table.tenant_id == tenant_id, table.currency == currency) for table in (Credit, ResidencyCharge)
    ]
    if await conn.scalar(select(or_(*money))):
        raise ConflictError(f"A tenant has one currency: this one has grants or charges in {currency}.")
    began = ApiKey.last_used_at > now_ms // 1000 - UNPOSTED_S
    if await conn.scalar(select(exists().where(ApiKey.tenant_id == tenant_id, began))):
        raise ConflictError(
            f"A key of the tenant was used within {UNPOSTED_S // 60} minutes, and may still be charged in {currency}: "
            "try again later, without requests in between."
        )


async def currencies(conn: AsyncConnection, tenant_ids: Collection[str], at_ms: int) -> dict[str, str]:
    """Returns the currency that each tenant pays in at that time. It takes two statements."""
    sheets = await _own_sheets(conn, tenant_ids, at_ms)
    named = {DEFAULT_SHEET, *sheets.values()}
    query = select(PriceSheet.id, PriceSheet.currency).where(PriceSheet.id.in_(sorted(named)))
    found = {row.id: row.currency for row in await conn.execute(query)}
    return {tenant_id: found.get(sheets.get(tenant_id, DEFAULT_SHEET), DEFAULT_CURRENCY) for tenant_id in tenant_ids}


async def currency_of_tenant(conn: AsyncConnection, tenant_id: str, at_ms: int) -> str:
    """Returns the currency that the tenant pays in at that time. The operator's is that of the standard sheet."""
    return (await currencies(conn, [tenant_id], at_ms))[tenant_id]


async def check_currency(conn: AsyncConnection, tenant_id: str, given: str | None, at_ms: int) -> str:
    """Returns the currency that the tenant pays in. Raises InvalidError if `given` names another one."""
    own = await currency_of_tenant(conn, tenant_id, at_ms)
    if given is not None and given.upper() != own:
        whose = "Limits of all tenants together are" if tenant_id == OPERATOR_TENANT else "This project pays"
        raise InvalidError(f"{whose} in {own}, and not in {given.upper()}.", "currency")
    return own


async def price_for(conn: AsyncConnection, tenant_id: str, model: str, tier: Tier, at_ms: int) -> Price | None:
    """Returns the rates in force at that time, or None if there is no price, so that the request must be refused."""
    named = {"tenant_id": tenant_id, "model": model, "tier": tier, "at_ms": at_ms}
    (rows,) = await select_together(conn, named, _PRICE)
    row = next(iter(rows), None)
    return None if row is None else Price(f"{row.sheet_id}@{row.version}", row.currency, _rates(row))


async def next_change_ms(conn: AsyncConnection, at_ms: int) -> int | None:
    """Returns the first moment after `at_ms` at which a price of anybody begins or ends, or None."""
    moments = [
        select(func.min(moment)).where(moment > at_ms).scalar_subquery()
        for table in (PriceAssignment, PriceSheetVersion)
        for moment in (table.from_ms, table.until_ms)
    ]
    row = (await conn.execute(select(*moments))).one()
    return min((moment for moment in row if moment is not None), default=None)


async def highest_rates(conn: AsyncConnection, tenant_ids: Collection[str], at_ms: int) -> dict[str, Rates]:
    """Returns the highest rate of every token class in force for each tenant, over all models and tiers. It takes two
    statements."""
    if not tenant_ids:
        return {}
    sheets = await _own_sheets(conn, tenant_ids, at_ms)
    query = (
        select(PriceRate.sheet_id, *(func.max(getattr(PriceRate, name)) for name in TOKEN_CLASSES))
        .join(PriceSheetVersion, _IS_OF_VERSION)
        .where(PriceRate.sheet_id.in_(sorted({DEFAULT_SHEET, *sheets.values()})), covers(PriceSheetVersion, at_ms))
        .group_by(PriceRate.sheet_id)
    )
    highest = {row[0]: Rates(*map(int, row[1:])) for row in await conn.execute(query)}
    found = {tenant_id: sheets.get(tenant_id, DEFAULT_SHEET) for tenant_id in tenant_ids}
    return {tenant_id: highest[sheet] for tenant_id, sheet in found.items() if sheet in highest}


async def residency_rates(conn: AsyncConnection, price_version: str, model: str) -> tuple[int, int] | None:
    """Returns the rates of the version that a charge recorded."""
    sheet_id, _, number = price_version.rpartition("@")
    query = select(PriceResidency.cache, PriceResidency.pinned).where(
        PriceResidency.sheet_id == sheet_id, PriceResidency.version == int(number), PriceResidency.model == model
    )
    row = (await conn.execute(query)).first()
    return None if row is None else (row.cache, row.pinned)


async def priced_models(conn: AsyncConnection, tenant_id: str, at_ms: int) -> list[str]:
    """Returns the models that the tenant can be billed for, sorted."""
    rows = (await conn.execute(_in_force(tenant_id, at_ms))).all()
    return sorted({row.model for row in rows})


async def rates_of(conn: AsyncConnection, price_version: str, model: str, tier: Tier) -> Rates | None:
    """Returns the rates of the version that an OPEN recorded, for re-pricing."""
    return rates_in(await version_rates(conn, price_version), model, tier)


async def version_rates(conn: AsyncConnection, price_version: str) -> RateTable:
    """Returns all rates of a version; they are empty if there is no such version."""
    sheet_id, _, number = price_version.rpartition("@")
    return await _rates_of_version(conn, sheet_id, int(number)) if number.isdecimal() else {}


def rates_in(rates: RateTable, model: str, tier: Tier) -> Rates | None:
    """Returns the rates that `model` has in a version. An adapter that the version does not name has those of its base
    model, as at admission."""
    own = rates.get((model, tier))
    return rates.get((base_of(model), tier)) if own is None else own


async def bootstrap(conn: AsyncConnection, models: Mapping[str, Mapping[Tier, Rates]], now_ms: int) -> list[str]:
    """Prices those of `models` that no version of the default sheet ever named. Returns those that stay without a
    price, as the sheet's last version begins or ends later: only the operator knows what they cost by then."""
    sheet = {"id": DEFAULT_SHEET, "currency": DEFAULT_CURRENCY, "created_at": now_ms // 1000}
    await insert_new(conn, PriceSheet.__table__, [sheet], (PriceSheet.id,))
    named = select(PriceRate.model).where(PriceRate.sheet_id == DEFAULT_SHEET).distinct()
    new = sorted(models.keys() - {*(await conn.execute(named)).scalars()})
    last = await _last_version(conn, DEFAULT_SHEET)
    if last is not None and max(last.from_ms, last.until_ms or 0) > now_ms:
        return new
    rates = {(model, tier): rate for model in new for tier, rate in models[model].items()}
    from_ms = now_ms
    residency: ResidencyTable = {}
    if last is not None:
        # Two models may be added within one millisecond, and an interval must not be empty.
        from_ms = max(now_ms, last.from_ms + 1)
        if last.until_ms is None:
            rates |= await _rates_of_version(conn, DEFAULT_SHEET, last.version)
            residency = await _residency_of_version(conn, DEFAULT_SHEET, last.version)
    if new:
        await add_version(conn, DEFAULT_SHEET, rates, from_ms, residency=residency)
    return []


async def _own_sheets(conn: AsyncConnection, tenant_ids: Collection[str], at_ms: int) -> dict[str, str]:
    """Returns the sheets of those tenants that have a sheet of their own at that time."""
    own = select(PriceAssignment.tenant_id, PriceAssignment.sheet_id).where(
        PriceAssignment.tenant_id.in_(sorted(tenant_ids)), covers(PriceAssignment, at_ms)
    )
    return {row.tenant_id: row.sheet_id for row in await conn.execute(own)}


def _in_force(tenant_id: str | BindParameter[str], at_ms: int | BindParameter[int]) -> Select[Any]:
    return (
        select(PriceRate.__table__, PriceSheet.currency)
        .join(PriceSheetVersion, _IS_OF_VERSION)
        .join(PriceSheet, PriceSheet.id == PriceRate.sheet_id)
        .where(PriceRate.sheet_id == _sheet_of(tenant_id, at_ms), covers(PriceSheetVersion, at_ms))
    )


def _sheet_of(tenant_id: str | BindParameter[str], at_ms: int | BindParameter[int]) -> ColumnElement[str]:
    """Returns the tenant's own sheet, or the default one."""
    own = select(PriceAssignment.sheet_id).where(PriceAssignment.tenant_id == tenant_id, covers(PriceAssignment, at_ms))
    return func.coalesce(own.scalar_subquery(), DEFAULT_SHEET)


def covers(
    table: type[PriceAssignment] | type[PriceSheetVersion], at_ms: int | BindParameter[int]
) -> ColumnElement[bool]:
    """Returns the condition that a row is in force at that time."""
    return and_(table.from_ms <= at_ms, or_(table.until_ms.is_(None), table.until_ms > at_ms))


_PRICE = _in_force(bindparam("tenant_id"), bindparam("at_ms")).where(
    PriceRate.model == bindparam("model"), PriceRate.tier == bindparam("tier")
)
"""The rates of a tenant's model and tier."""


async def _last_version(conn: AsyncConnection, sheet_id: str) -> Row[int, int, int | None] | None:
    query = (
        select(PriceSheetVersion.version, PriceSheetVersion.from_ms, PriceSheetVersion.until_ms)
        .where(PriceSheetVersion.sheet_id == sheet_id)
        .order_by(PriceSheetVersion.version.desc())
        .limit(1)
    )
    return (await conn.execute(query)).first()


async def _end_predecessor(conn: AsyncConnection, sheet_id: str, last: Row[int, int, int | None], from_ms: int) -> None:
    """Ends the last version. Versions have the same order in time as in number, so only the last one can overlap.
    Raises ConflictError."""
    if from_ms <= last.from_ms or (last.until_ms is not None and from_ms < last.until_ms):
        raise ConflictError("The price interval overlaps with an earlier one.")
    if last.until_ms is None:
        await conn.execute(
            update(PriceSheetVersion)
            .where(PriceSheetVersion.sheet_id == sheet_id, PriceSheetVersion.version == last.version)
            .values(until_ms=from_ms)
        )


async def _rates_of_version(conn: AsyncConnection, sheet_id: str, version: int) -> dict[tuple[str, Tier], Rates]:
    query = select(PriceRate.__table__).where(PriceRate.sheet_id == sheet_id, PriceRate.version == version)
    return {(row.model, row.tier): _rates(row) for row in await conn.execute(query)}


async def _residency_of_version(conn: AsyncConnection, sheet_id: str, version: int) -> ResidencyTable:
    table = PriceResidency
    query = select(table.__table__).where(table.sheet_id == sheet_id, table.version == version)
    return {row.model: (row.cache, row.pinned) for row in await conn.execute(query)}


def _rates(row: Row[Any]) -> Rates:
    return Rates(row.cache_read, row.cache_write, row.uncached, row.output)


def _columns(rates: Rates) -> dict[str, int]:
    return {name: getattr(rates, name) for name in TOKEN_CLASSES}


def _check_rates(rates: RateTable) -> None:
    if not rates:
        raise InvalidError("A price version needs at least one rate.", "rates")
    for (model, _), rate in rates.items():
        texts.refuse_hidden(model, "rates")
        for name, value in _columns(rate).items():
            if not 0 <= value <= MAX_RATE:
                raise InvalidError(f"The rate {name} must be 0 to {MAX_RATE}.", name)


async def _add_residency(conn: AsyncConnection, sheet_id: str, version: int, residency: ResidencyTable) -> None:
    for model, (cache, pinned) in residency.items():
        if not (0 <= cache <= MAX_RATE and 0 <= pinned <= MAX_RATE):
            raise InvalidError(f"A rate of residency must be 0 to {MAX_RATE}.", "residency")
        await conn.execute(
            insert(PriceResidency).values(sheet_id=sheet_id, version=version, model=model, cache=cache, pinned=pinned)
        )
