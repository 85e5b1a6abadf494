"""Prepaid grants, and corrections of charged requests. Each is a new ledger row; no booked row is ever edited.

A grant lies on the tenant's prepaid account until the close of a month uses it for usage (`invoices.py`) or it expires.
A correction points at the row it corrects and never takes back more than was charged there; a charge that a reversal
took back has nothing left. Before the row's period is
closed the correction is an adjustment on the next invoice; afterwards it is a credit note with its own number.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Literal

import msgspec
from sqlalchemy import Row, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import documents, invoice_numbers
from accounting.billing.grants import Grant
from accounting.billing.invoice_lines import Line
from accounting.database import auth_epoch
from accounting.database.paging import Page, newest_first, one, shaped
from accounting.ledger import ledger
from accounting.prices import prices
from accounting.tables.billing_models import InvoiceTerms
from accounting.tables.invoice_models import Credit, CreditUse, Invoice, InvoiceLine
from accounting.tables.models import LedgerEntry, Tenant
from accounting.tables.request_models import RequestLog
from accounting.terms import amounts
from accounting.terms import terms as frozen
from accounting.values import currencies
from accounting.values.budget_types import MAX_AMOUNT
from accounting.values.errors import ConflictError, InvalidError, KeyReusedError, NotFoundError
from accounting.values.ids import new_id
from accounting.values.periods import bounds, period_of
from accounting.values.types import CORRECTIONS, TOKEN_CLASSES

CreditType = Literal["grant", "credit_note", "adjustment"]
PREPAID = "prepaid_grants"


class NewCredit(msgspec.Struct, frozen=True, kw_only=True):
    """A credit that the operator asks for. A correction takes tenant and currency from the row it corrects."""

    type: CreditType
    tenant_id: str
    amount: int
    currency: str | None = None
    """The default is the one that the tenant pays in."""
    source: Literal["cash", "promotion"] = "cash"
    priority: int = 100
    starts_at: int | None = None
    expires_at: int | None = None
    corrects: str | None = None
    note: str = ""


class CreditInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: CreditType
    tenant_id: str
    currency: str
    amount: int
    remaining: int | None
    """Micro-units of a grant that no invoice has taken yet; None for other types."""
    source: str | None
    priority: int
    starts_at: int
    expires_at: int | None
    corrects: str | None
    number: str | None
    """Number of a credit note; None for other types."""
    note: str
    created_at: int


async def create(
    conn: AsyncConnection, wanted: NewCredit, *, key: str, now_ms: int, actor: str
) -> tuple[CreditInfo, bool]:
    """Returns (the credit, whether the same idempotency key had made it before). Raises KeyReusedError if the key was
    used for another request."""
    fingerprint = sha256(msgspec.json.encode(wanted)).digest()
    now_ms = await ledger.take_turn(conn, now_ms)
    known = (await conn.execute(select(Credit.id, Credit.fingerprint).where(Credit.idempotency_key == key))).first()
    if known is not None:
        if known.fingerprint != fingerprint:
            raise KeyReusedError("The Idempotency-Key was used with another request.")
        return await get(conn, known.id), True
    _check(wanted, now_ms)
    credit_id = new_id("credit")
    values = {
        "id": credit_id,
        "type": wanted.type,
        "amount": wanted.amount,
        "priority": wanted.priority,
        "starts_at": wanted.starts_at or now_ms // 1000,
        "expires_at": wanted.expires_at,
        "note": wanted.note,
        "created_at": now_ms // 1000,
        "actor": actor,
        "idempotency_key": key,
        "fingerprint": fingerprint,
    }
    if wanted.type == "grant":
        await _grant(conn, wanted, values, now_ms)
    else:
        await _correct(conn, wanted, values, now_ms)
    await auth_epoch.record(
        conn,
        f"headgate.{wanted.type}.created",
        actor=actor,
        now=now_ms // 1000,
        tenant_id=wanted.tenant_id,
        object_id=credit_id,
        detail={"micro_units": wanted.amount},
    )
    return await get(conn, credit_id), False


async def get(conn: AsyncConnection, credit_id: str) -> CreditInfo:
    return _info(await one(conn, _listed().where(Credit.id == credit_id), "There is no such credit."))


async def list_credits(
    conn: AsyncConnection, *, tenant_id: str | None = None, after: str | None = None, limit: int
) -> Page[CreditInfo]:
    query = _listed()
    if tenant_id is not None:
        query = query.where(Credit.tenant_id == tenant_id)
    page = await newest_first(conn, query, Credit, after, limit)
    return page.of(_info)


async def corrected(conn: AsyncConnection, tenant_id: str, start: int, end: int) -> dict[str, int]:
    """Returns the micro-units of the corrections that were given in [start, end), Unix seconds, by currency."""
    query = (
        select(Credit.currency, func.sum(Credit.amount))
        .where(Credit.tenant_id == tenant_id, Credit.type.in_(CORRECTIONS))
        .where(Credit.created_at >= start, Credit.created_at < end)
        .group_by(Credit.currency)
    )
    return {row[0]: int(row[1]) for row in await conn.execute(query)}


async def open_grants(conn: AsyncConnection, tenant_id: str, currency: str) -> list[Grant]:
    """Returns the grants that have micro-units left, and how many. Ended grants are among them, as they paid for their
    time."""
    query = _listed().where(Credit.tenant_id == tenant_id, Credit.type == "grant", Credit.currency == currency)
    rows = (await conn.execute(query)).all()
    grants = [
        Grant(r.id, r.amount - int(r.used), r.priority, r.starts_at, r.expires_at, r.source, r.note) for r in rows
    ]
    return [grant for grant in grants if grant.remaining]


async def use(
    conn: AsyncConnection,
    grant: Grant,
    amount: int,
    *,
    expired: bool,
    tenant_id: str,
    currency: str,
    number: str,
    now_ms: int,
) -> None:
    """The close of a month takes the amount of a grant that pays for usage, or the rest that expired unused."""
    query = select(func.max(CreditUse.use_no)).where(CreditUse.credit_id == grant.id)
    use_no = (await conn.scalar(query) or 0) + 1
    kind = "grant_expiry" if expired else "grant_use"
    values = {"credit_id": grant.id, "use_no": use_no, "kind": kind, "amount": amount, "number": number}
    await conn.execute(insert(CreditUse).values(**values))
    entry = ledger.blank(kind, grant.id, use_no, tenant_id, currency, now_ms)
    taker = "expired_grants" if expired else "tenant_receivable"
    await ledger.post_transfer(conn, entry, PREPAID, taker, amount)


def _check(wanted: NewCredit, now_ms: int) -> None:
    if not 0 < wanted.amount <= MAX_AMOUNT:
        raise InvalidError(f"The amount must be 1 to {MAX_AMOUNT} micro-units.", "amount_micro_units")
    if (wanted.type == "grant") != (wanted.corrects is None):
        raise InvalidError("A correction, and only a correction, names what it corrects.", "corrects")
    ends = wanted.expires_at
    if ends is not None and (wanted.type != "grant" or ends <= (wanted.starts_at or now_ms // 1000)):
        raise InvalidError("A grant must end after it starts, and only a grant ends.", "expires_at")


async def _grant(conn: AsyncConnection, wanted: NewCredit, values: dict[str, Any], now_ms: int) -> None:
    if await conn.scalar(select(Tenant.id).where(Tenant.id == wanted.tenant_id)) is None:
        raise NotFoundError("There is no such tenant.")
    currency = await prices.check_currency(conn, wanted.tenant_id, wanted.currency, now_ms)
    owner = {"tenant_id": wanted.tenant_id, "currency": currency}
    await conn.execute(insert(Credit).values(**values, **owner, source=wanted.source))
    entry = ledger.blank("grant", values["id"], 0, wanted.tenant_id, currency, now_ms)
    await ledger.post_transfer(conn, entry, wanted.source, PREPAID, wanted.amount)


async def _correct(conn: AsyncConnection, wanted: NewCredit, values: dict[str, Any], now_ms: int) -> None:
    query = select(LedgerEntry.__table__).where(
        LedgerEntry.request_id == wanted.corrects,
        LedgerEntry.kind == "settle",
        LedgerEntry.tenant_id == wanted.tenant_id,
    )
    wrong = (await conn.execute(query)).mappings().first()
    if wrong is None and not await _is_known(conn, wanted):
        raise NotFoundError("There is no such charge of this tenant.")
    if wrong is None or not wrong["charge"]:
        raise ConflictError("This request cost nothing: there is no charge to correct.")
    taken_back = select(LedgerEntry.request_id).where(
        LedgerEntry.request_id == wanted.corrects, LedgerEntry.kind == "reversal"
    )
    if await conn.scalar(taken_back) is not None:
        raise ConflictError(
            "This charge was taken back when its request was repeated: nothing is left to be corrected."
        )
    invoice = await _invoice_of(conn, wrong)
    if wanted.type == "credit_note" and invoice is None:
        raise ConflictError("This charge is on no invoice yet: correct it by an adjustment.")
    if wanted.type == "adjustment" and invoice is not None:
        raise ConflictError(f"This charge is on the invoice {invoice}: correct it by a credit note.")
    parts = await _parts(conn, wrong, wanted.amount)
    owner = {"tenant_id": wrong["tenant_id"], "currency": wrong["currency"]}
    row = {**values, **owner, "corrects_request_id": wanted.corrects}
    await conn.execute(insert(Credit).values(**row))
    kept = ("tenant_id", "key_id", "model", "root", "tier", "price_version", "currency")
    entry = ledger.blank(wanted.type, row["id"], 0, wrong["tenant_id"], wrong["currency"], now_ms)
    entry |= {name: wrong[name] for name in kept}
    entry |= {f"charge_{name}": -part for name, part in parts.items()}
    await ledger.post_correction(conn, {**entry, "charge": -wanted.amount})
    if invoice is not None:
        await _issue_note(conn, row, wrong, invoice, now_ms)


async def _is_known(conn: AsyncConnection, wanted: NewCredit) -> bool:
    """Returns whether the request is one of the tenant's: refused ones are in the request log alone."""
    for table in (LedgerEntry, RequestLog):
        mine = select(table.request_id).where(table.request_id == wanted.corrects, table.tenant_id == wanted.tenant_id)
        if await conn.scalar(mine.limit(1)) is not None:
            return True
    return False


async def _parts(conn: AsyncConnection, wrong: Any, amount: int) -> dict[str, int]:
    """Splits the amount by token class, within what earlier corrections left of the charge. Raises ConflictError beyond
    it."""
    columns = [func.coalesce(func.sum(getattr(LedgerEntry, f"charge_{n}")), 0) for n in TOKEN_CLASSES]
    query = select(*columns).join(Credit, Credit.id == LedgerEntry.request_id)
    earlier = (await conn.execute(query.where(Credit.corrects_request_id == wrong["request_id"]))).one()
    left = {name: wrong[f"charge_{name}"] + int(given) for name, given in zip(TOKEN_CLASSES, earlier, strict=True)}
    if amount > (rest := sum(left.values())):
        currency = wrong["currency"]
        raise ConflictError(f"Of this charge {currencies.written(rest, currency)} {currency} is left to be corrected.")
    parts: dict[str, int] = {}
    for name, most in left.items():
        parts[name] = min(most, amount)
        amount -= parts[name]
    return parts


async def _invoice_of(conn: AsyncConnection, wrong: Any) -> str | None:
    """Returns the number of the invoice that has the charge and is not void: the first that was closed after it was
    posted. An invoice that was issued again has the time of its first close."""
    voided = select(InvoiceTerms.refers_to).where(InvoiceTerms.voids)
    covering = (
        select(Invoice.number)
        .where(
            Invoice.tenant_id == wrong["tenant_id"],
            Invoice.series == invoice_numbers.INVOICE,
            Invoice.until_ms > wrong["opened_at_ms"],
            Invoice.cutoff_ms >= wrong["posted_at_ms"],
            Invoice.number.not_in(voided),
        )
        .order_by(Invoice.cutoff_ms, Invoice.version.desc())
    )
    return await conn.scalar(covering.limit(1))


async def _issue_note(conn: AsyncConnection, credit: dict[str, Any], wrong: Any, invoice: str, now_ms: int) -> None:
    """Writes a credit note to the invoice: under its rule of tax, from and to whom it was issued."""
    period = period_of(wrong["opened_at_ms"] // 1000)
    start, end = bounds(period)
    query = select(Tenant.name, Tenant.time_zone).where(Tenant.id == wrong["tenant_id"])
    tenant = (await conn.execute(query)).one()
    line = Line(
        kind="credit_note",
        period=period,
        model=wrong["model"],
        tier=wrong["tier"],
        price_version=wrong["price_version"],
        amount=-credit["amount"],
        credit_id=credit["id"],
        note=f"{wrong['request_id']} {credit['note']}".strip(),
    )
    columns = {
        "tenant_id": wrong["tenant_id"],
        "tenant_name": tenant.name,
        "time_zone": tenant.time_zone,
        "period": period,
        "version": await documents.next_version(conn, wrong["tenant_id"], period, invoice_numbers.CREDIT_NOTE),
        "currency": wrong["currency"],
        "from_ms": start * 1000,
        "until_ms": end * 1000,
        "cutoff_ms": now_ms,
        "created_at": now_ms // 1000,
        "num_requests": 0,
        "subtotal": line.amount,
        "prepaid": 0,
        "total": line.amount,
        "days": [],
    }
    corrected = (await frozen.of(conn, [invoice]))[invoice]
    decimals = currencies.decimals(wrong["currency"])
    terms = msgspec.structs.replace(
        corrected,
        decimals=decimals,
        discount=0,
        amounts=amounts.of_document(
            line.amount,
            0,
            await frozen.carried(conn, wrong["tenant_id"], wrong["currency"]),
            unit=currencies.unit(decimals),
            tax_rate=corrected.rule.rate,
        ),
        settled_before=0,
        due_at=now_ms // 1000,
        refers_to=invoice,
        voids=False,
        note=credit["note"],
    )
    await documents.write(conn, columns, [line], terms, invoice_numbers.CREDIT_NOTE, now_ms)


def _listed() -> Any:
    used = select(func.coalesce(func.sum(CreditUse.amount), 0)).where(CreditUse.credit_id == Credit.id)
    number = select(InvoiceLine.number).where(InvoiceLine.credit_id == Credit.id, InvoiceLine.kind == "credit_note")
    return select(Credit.__table__, used.scalar_subquery().label("used"), number.scalar_subquery().label("number"))


def _info(row: Row[Any]) -> CreditInfo:
    remaining = row.amount - int(row.used) if row.type == "grant" else None
    return shaped(CreditInfo, row, remaining=remaining, corrects=row.corrects_request_id)
