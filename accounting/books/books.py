"""The equations (`equations.py`) that SQL alone can state, checked over everything. The module writes nothing.

Run it on one snapshot (`Database.read`). The caller names in `running` the requests that still run, or whose journal is
not replayed yet: a missing half is no failure for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, bindparam, case, func, literal, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.books import books_billing, books_documents, books_prices, books_upstreams, equations
from accounting.books.equations import BooksReport, Equation, EquationResult
from accounting.ledger.legs import CHARGES, COUNTED, TOKENS
from accounting.ledger.rollups import SPANS, Span, all_differing, table_of
from accounting.tables.batch_models import Batch, IdempotentReply
from accounting.tables.billing_models import InvoicePayment, InvoiceTerms
from accounting.tables.idempotency_models import IdempotentPosting
from accounting.tables.invoice_models import Credit, CreditUse
from accounting.tables.models import ApiKey, EngineRecordRow, LedgerEntry, LedgerLeg, Tenant
from accounting.tables.residency_models import ResidencyCharge
from accounting.values.progress import Told, nobody
from accounting.values.types import BILLED, CORRECTIONS, OPERATOR_TENANT, RESIDENCY, TOKEN_CLASSES, WITHOUT_REQUEST

MAX_FAILURES = 100
"""Failures that are named per equation: one is enough to stop, a hundred are enough to see a pattern."""

ENDING = LedgerEntry.kind.in_(("settle", "void"))


async def verify(conn: AsyncConnection, *, running: Collection[str] = (), told: Told = nobody) -> BooksReport:
    """Checks every equation over all of the books; `told` hears of each that is checked."""
    skip = frozenset(running)
    checks: tuple[Callable[[], Awaitable[EquationResult]], ...] = (
        lambda: _check(conn, equations.CONSERVATION, _conservation(), skip),
        lambda: _check(conn, equations.BALANCE, _balance()),
        lambda: _check(conn, equations.ONE_ENDING, _one_ending(), skip),
        lambda: _check(conn, equations.WITHIN_RESERVATION, _within_reservation()),
        lambda: _rollup_truth(conn),
        lambda: books_billing.invoice_truth(conn),
        lambda: _check(conn, equations.TENANCY_CLOSED, _tenancy_closed()),
        lambda: _check(conn, equations.IDEMPOTENCY, _idempotency(), skip),
        lambda: books_billing.immutability(conn),
        lambda: books_documents.rounding(conn),
        lambda: books_upstreams.bought_tokens(conn, skip),
        lambda: books_upstreams.bought_money(conn),
        lambda: books_upstreams.bought_days(conn),
        lambda: _check(conn, equations.PRICE_IN_FORCE, _price_in_force()),
    )
    results = []
    for check in checks:
        results.append(await check())
        told(len(results), len(checks))
    return BooksReport(tuple(results))


async def verify_ended(
    conn: AsyncConnection, since_ms: int, until_ms: int, unwitnessed: frozenset[str] = frozenset()
) -> BooksReport:
    """Checks the equations that hold for each request by itself, over requests whose ending was posted in [since,
    until). Records of the `unwitnessed` are still to come."""
    span = {"since_ms": since_ms, "until_ms": until_ms}
    return BooksReport(
        (
            await _check(conn, equations.CONSERVATION, _conservation(ENDED), unwitnessed, span),
            await _check(conn, equations.BALANCE, _balance(ENDED), span=span),
            await _check(conn, equations.ONE_ENDING, _one_ending(ENDED), span=span),
            await _check(conn, equations.WITHIN_RESERVATION, _within_reservation(ENDED), span=span),
            await _check(conn, equations.PRICE_IN_FORCE, _price_in_force(ENDED), span=span),
        )
    )


Ids = Select[str]
"""Ids of the requests that are checked; None instead of it means all."""

ENDED: Ids = select(LedgerEntry.request_id).where(
    ENDING, LedgerEntry.posted_at_ms >= bindparam("since_ms"), LedgerEntry.posted_at_ms < bindparam("until_ms")
)
_ANY_ENDED = ENDED.limit(1)


async def any_ended(conn: AsyncConnection, since_ms: int, until_ms: int) -> bool:
    """Says whether `verify_ended` would check a request at all."""
    return await conn.scalar(_ANY_ENDED, {"since_ms": since_ms, "until_ms": until_ms}) is not None


class Statements(NamedTuple):
    """The statements of one equation. They are made once: each minute's check would leave thousands of objects in
    reference cycles."""

    num_checked: Select[int]
    wrong: tuple[Select[str], ...]
    """Each selects ids of requests that break the equation, `most` of them."""


async def _check(
    conn: AsyncConnection,
    equation: Equation,
    statements: Statements,
    skip: frozenset[str] = frozenset(),
    span: Mapping[str, int] | None = None,
) -> EquationResult:
    """Checks one equation. `skip` names requests that are left out; `span` has the parameters of `ENDED`."""
    bounds = dict(span or {})
    num_checked = await conn.scalar(statements.num_checked, bounds) or 0
    failures: dict[str, None] = {}
    for wrong in statements.wrong:
        rows = await conn.execute(wrong, {**bounds, "most": MAX_FAILURES + len(skip)})
        names = sorted(name for name in rows.scalars() if name not in skip)
        failures |= dict.fromkeys(names[:MAX_FAILURES])
    return EquationResult(equation, num_checked, tuple(sorted(failures)))


def _statements(checked: Select[Any], *wrong: Select[Any]) -> Statements:
    return Statements(_counting(checked), tuple(query.limit(bindparam("most")) for query in wrong))


@cache
def _conservation(among: Ids | None = None) -> Statements:
    """Per request and class, and so per tenant too: posted + written off - counted by the engine == 0."""
    ledger = select(LedgerEntry.request_id, *(getattr(LedgerEntry, name).label(name) for name in COUNTED))
    engine = select(EngineRecordRow.request_id, *((-getattr(EngineRecordRow, name)).label(name) for name in COUNTED))
    if among is not None:
        ledger = ledger.where(LedgerEntry.request_id.in_(among))
        engine = engine.where(EngineRecordRow.request_id.in_(among))
    both = union_all(ledger, engine).subquery()
    return _statements(select(both.c.request_id).distinct(), _not_zero(both, ["request_id"], COUNTED))


@cache
def _balance(among: Ids | None = None) -> Statements:
    """Debits equal credits per unit, and the legs add up to the amounts of their entry. What a request owes is on the
    tenant's account, and its revenue is of the classes that were charged."""
    event = (LedgerLeg.request_id, LedgerLeg.kind, LedgerLeg.attempt)
    unbalanced = select(LedgerLeg.request_id).group_by(*event, LedgerLeg.unit).having(func.sum(LedgerLeg.amount) != 0)
    tokens = sum((getattr(LedgerEntry, name) for name in COUNTED[1:]), LedgerEntry.cache_read)
    entries = select(
        LedgerEntry.request_id,
        LedgerEntry.kind,
        LedgerEntry.attempt,
        func.abs(tokens).label("tokens"),
        func.abs(LedgerEntry.charge).label("money"),
        *(getattr(LedgerEntry, name).label(name) for name in CHARGES),
    ).where(LedgerEntry.kind.not_in(WITHOUT_REQUEST))
    grants = select(Credit.id, literal("grant"), literal(0), literal(0), Credit.amount).where(Credit.type == "grant")
    uses = select(CreditUse.credit_id, CreditUse.kind, CreditUse.use_no, literal(0), CreditUse.amount)
    kept = select(
        ResidencyCharge.request_id,
        literal(RESIDENCY),
        ResidencyCharge.attempt,
        literal(0),
        ResidencyCharge.charge_cache + ResidencyCharge.charge_pinned,
    )
    taxes = select(
        InvoiceTerms.number, literal("tax"), literal(0), literal(0), func.abs(InvoiceTerms.tax_amount)
    ).where(InvoiceTerms.tax_amount != 0)
    payments = select(
        InvoicePayment.number, literal("payment"), InvoicePayment.payment_no, literal(0), InvoicePayment.amount
    )
    of_request = LedgerLeg.kind.not_in(WITHOUT_REQUEST)
    owed = case((and_(of_request, LedgerLeg.account == "tenant_receivable"), -LedgerLeg.amount), else_=0)
    revenue = and_(of_request, LedgerLeg.account == "revenue")
    debit = case((LedgerLeg.amount > 0, -LedgerLeg.amount), else_=0)
    booked = select(
        *event,
        case((LedgerLeg.unit == TOKENS, debit), else_=0).label("tokens"),
        case((LedgerLeg.unit != TOKENS, debit), else_=0).label("money"),
        owed,
        *(case((and_(revenue, LedgerLeg.token_class == name), LedgerLeg.amount), else_=0) for name in TOKEN_CLASSES),
    )
    if among is not None:
        unbalanced = unbalanced.where(LedgerLeg.request_id.in_(among))
        entries = entries.where(LedgerEntry.request_id.in_(among))
        booked = booked.where(LedgerLeg.request_id.in_(among))
    # Money that belongs to no request is left out of a check of single requests.
    money = (grants, uses, kept, taxes, payments) if among is None else ()
    others = [query.add_columns(*(literal(0) for _ in CHARGES)) for query in money]
    both = union_all(entries, *others, booked).subquery()
    unequal = _not_zero(both, ["request_id", "kind", "attempt"], ("tokens", "money", *CHARGES))
    return _statements(_entries(among), unbalanced, unequal)


@cache
def _one_ending(among: Ids | None = None) -> Statements:
    """Every request that the engine worked on has ended exactly once."""
    endings = select(
        LedgerEntry.request_id, case((ENDING, 1), else_=0).label("endings"), literal(0).label("seen")
    ).where(LedgerEntry.kind.not_in((*CORRECTIONS, *WITHOUT_REQUEST)))
    seen = select(EngineRecordRow.request_id, literal(0).label("endings"), literal(1).label("seen"))
    if among is not None:
        endings = endings.where(LedgerEntry.request_id.in_(among))
        seen = seen.where(EngineRecordRow.request_id.in_(among))
    both = union_all(endings, seen).subquery()
    wrong = select(both.c.request_id).group_by(both.c.request_id).having(func.sum(both.c.endings) != 1)
    return _statements(select(both.c.request_id).distinct(), wrong)


@cache
def _within_reservation(among: Ids | None = None) -> Statements:
    """A settle costs at most the reserved amount. Reversals and corrections take charges back. Every other entry costs
    0."""
    too_much = or_(
        LedgerEntry.charge > LedgerEntry.reserved,
        and_(LedgerEntry.kind.not_in((*BILLED, *CORRECTIONS)), LedgerEntry.charge != 0),
    )
    return _statements(_entries(among), _entries(among).where(too_much))


@cache
def _price_in_force(among: Ids | None = None) -> Statements:
    """Each settle is priced by a version that was in force for its tenant."""
    settles = _entries(among).where(LedgerEntry.kind == "settle")
    return _statements(settles, books_prices.not_in_force(settles))


async def _rollup_truth(conn: AsyncConnection) -> EquationResult:
    """Minute, hour and day sums equal the sums of rows, and months equal the sums of days, key by key."""
    num_checked = 0
    failures: list[str] = []
    for span in SPANS:
        rows = (await conn.execute(_wrong_buckets(conn.dialect.name, span))).all()
        failures += [f"{span} bucket {row.bucket}: {', '.join(map(str, row[1:]))}" for row in rows]
        num_checked += await conn.scalar(_num_buckets(span)) or 0
    return EquationResult(equations.ROLLUP_TRUTH, num_checked, tuple(failures))


@cache
def _wrong_buckets(dialect: str, span: Span) -> Select[Any]:
    return all_differing(dialect, span).limit(MAX_FAILURES)


@cache
def _num_buckets(span: Span) -> Select[int]:
    return _counting(select(table_of(span).bucket))


@cache
def _tenancy_closed() -> Statements:
    """Every row has a tenant, and no row of one tenant refers to another tenant's key, batch or engine record."""
    orphan = select(LedgerEntry.request_id).where(LedgerEntry.tenant_id.not_in(select(Tenant.id)))
    stray_record = select(EngineRecordRow.request_id).where(EngineRecordRow.tenant_id.not_in(select(Tenant.id)))
    # Warm-up has no key, so rows of the operator may name none. The entries that end requests of a lost journal name
    # none either.
    foreign_key = (
        select(LedgerEntry.request_id)
        .outerjoin(ApiKey, and_(ApiKey.id == LedgerEntry.key_id, ApiKey.tenant_id == LedgerEntry.tenant_id))
        .where(ApiKey.id.is_(None), LedgerEntry.tenant_id != OPERATOR_TENANT)
        .where(LedgerEntry.kind.not_in(WITHOUT_REQUEST))
        .where(or_(LedgerEntry.key_id != "", LedgerEntry.charge != 0))
    )
    foreign_batch = (
        select(LedgerEntry.request_id)
        .join(Batch, Batch.id == LedgerEntry.batch_id)
        .where(or_(Batch.tenant_id != LedgerEntry.tenant_id, Batch.key_id != LedgerEntry.key_id))
    )
    foreign_record = (
        select(LedgerEntry.request_id)
        .join(EngineRecordRow, EngineRecordRow.request_id == LedgerEntry.request_id)
        .where(EngineRecordRow.tenant_id != LedgerEntry.tenant_id)
    )
    wrong = (orphan, stray_record, foreign_key, foreign_batch, foreign_record)
    return _statements(select(LedgerEntry.request_id), *(query.distinct() for query in wrong))


@cache
def _idempotency() -> Statements:
    """Every stored answer that costs something has a settle (an answer to several prompts has one for each). The table
    itself allows only one answer per key."""
    first = select(IdempotentReply.request_id).where(IdempotentReply.posting.is_not(None))
    stored = union_all(first, select(IdempotentPosting.request_id)).subquery()
    settled = select(LedgerEntry.request_id).where(
        LedgerEntry.request_id == stored.c.request_id, LedgerEntry.kind == "settle"
    )
    wrong = select(stored.c.request_id).where(~settled.exists())
    return _statements(select(stored.c.request_id), wrong)


def _not_zero(both: Any, keys: list[str], sums: Collection[str]) -> Select[Any]:
    """Selects the groups in which the two signed halves do not cancel out."""
    return (
        select(both.c.request_id)
        .group_by(*(both.c[name] for name in keys))
        .having(or_(*(func.sum(both.c[name]) != 0 for name in sums)))
    )


def _entries(among: Ids | None) -> Ids:
    every = select(LedgerEntry.request_id)
    return every if among is None else every.where(LedgerEntry.request_id.in_(among))


def _counting(query: Select[Any]) -> Select[int]:
    return select(func.count()).select_from(query.subquery())
