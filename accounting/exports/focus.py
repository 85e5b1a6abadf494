"""FOCUS 1.2 (FinOps Open Cost and Usage Specification) rows. There is one row per day, key, model, tier and token
class; one per day, tenant, model and class of kept KV; and those of each document: credits, adjustments, tax, rounding.
Money is a decimal of exact micro-units.

`BilledCost` summed by `InvoiceId` is what is due by that document. What was exported once stays true: usage keeps the
first invoice of its month, and what is made void later is taken back and billed anew by rows of the later month.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import and_, not_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import invoice_lines, invoice_numbers, residency_sums
from accounting.billing.invoice_lines import Line
from accounting.database.db import Database
from accounting.exports import exports
from accounting.prices import price_lists, prices, pricing
from accounting.prices.prices import DEFAULT_SHEET
from accounting.prices.repricing import RatesByVersion
from accounting.tables.billing_models import InvoiceTerms
from accounting.tables.invoice_models import Invoice
from accounting.tables.models import ApiKey, Tenant
from accounting.terms import profiles
from accounting.values.errors import NotFoundError
from accounting.values.periods import DAY_S, bounds, period_of
from accounting.values.progress import Told, nobody
from accounting.values.types import TOKEN_CLASSES, Rates, Tier, Usage

COLUMNS = (
    "BillingAccountId",
    "BillingAccountName",
    "BillingAccountType",
    "SubAccountId",
    "SubAccountName",
    "SubAccountType",
    "BilledCost",
    "EffectiveCost",
    "ContractedCost",
    "ListCost",
    "ContractedUnitPrice",
    "ListUnitPrice",
    "PricingQuantity",
    "PricingUnit",
    "PricingCategory",
    "ConsumedQuantity",
    "ConsumedUnit",
    "BillingCurrency",
    "PricingCurrency",
    "InvoiceId",
    "InvoiceIssuerName",
    "BillingPeriodStart",
    "BillingPeriodEnd",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "ChargeClass",
    "ChargeFrequency",
    "ChargeDescription",
    "ProviderName",
    "PublisherName",
    "ServiceCategory",
    "ServiceSubcategory",
    "ServiceName",
    "SkuId",
    "SkuMeter",
    "SkuPriceId",
    "ResourceId",
    "ResourceType",
    "RegionId",
    "Tags",
    "x_tier",
    "x_batch_id",
)


DECIMALS = {
    "BilledCost": 6,
    "EffectiveCost": 6,
    "ContractedCost": 6,
    "ListCost": 6,
    "ContractedUnitPrice": 6,
    "ListUnitPrice": 6,
    "PricingQuantity": 9,
}
"""The most places of each decimal: six of money and of millions of tokens, nine of GB-hours."""
INTEGERS = frozenset({"ConsumedQuantity"})


class Names:
    """Names of tenants and keys, documents and list prices, all read once."""

    def __init__(self) -> None:
        self.tenants: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.invoices: dict[tuple[str, str], str] = {}
        """The first invoice of each tenant and period."""
        self.issuers: dict[str | None, str] = {}
        """The issuer of each document. Under None is the one of the next documents."""
        self.rates = RatesByVersion()
        self._list: list[price_lists.SheetVersion] = []

    async def read(self, conn: AsyncConnection) -> None:
        self.tenants = {row.id: row.name for row in await conn.execute(select(Tenant.id, Tenant.name))}
        for key_id, name in await conn.execute(select(ApiKey.id, ApiKey.name)):
            self.keys[key_id] = name or ""
        self.issuers[None] = (await profiles.issuer(conn)).name
        query = select(Invoice.tenant_id, Invoice.period, Invoice.number, Invoice.series, Invoice.issuer)
        for tenant, period, number, series, issuer in await conn.execute(query.order_by(Invoice.version.desc())):
            self.issuers[number] = issuer
            if series == invoice_numbers.INVOICE:
                self.invoices[(tenant, period)] = number
        try:
            self._list = await price_lists.versions_of(conn, DEFAULT_SHEET)
        except NotFoundError:
            self._list = []

    def list_rates(self, second: int, model: str, tier: Tier, currency: str) -> Rates | None:
        """Returns the rates of the default sheet that were in force when the day began, if it is in that currency. For
        a day before the first version they are those of the first version."""
        for version in reversed(self._list):
            if version.currency == currency and (version.from_ms <= second * 1000 or version is self._list[0]):
                return next((r.rates for r in version.rates if (r.model, r.tier) == (model, tier)), None)
        return None


async def rows(
    database: Database, start: int, end: int, page_rows: int = exports.PAGE_ROWS, told: Told = nobody
) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Yields pages of rows in the order of `COLUMNS`: usage by day, then kept KV by day, then documents."""
    names = Names()
    async with database.read() as conn:
        await names.read(conn)
    async for page in exports.usage_rows(database, start, end, page_rows, told):
        made = []
        async with database.read() as conn:
            for row in page:
                rates = await names.rates.of(conn, row.price_version, row.model, row.tier)
                made += [_in_order(values) for values in _usage(names, row, rates)]
        yield made
    for others in (_kept, _documents):
        async with database.read() as conn:
            made = [_in_order(values) async for values in others(conn, names, start, end)]
        if made:
            yield made


def _usage(names: Names, row: Any, rates: Rates | None) -> Iterable[dict[str, Any]]:
    # A tenant on a sheet in another currency has no list price but its own.
    listed = names.list_rates(row.bucket, row.model, row.tier, row.currency) or rates
    period = period_of(row.bucket)
    for name in TOKEN_CLASSES:
        tokens, charge = getattr(row, name), getattr(row, f"charge_{name}")
        if not tokens:
            continue
        list_cost = None
        if listed is not None:
            list_cost = getattr(pricing.sum_charge(Usage(**{name: tokens}), listed), name)
        yield {
            **_account(names, row.tenant_id, row.key_id),
            **_costs(charge, list_cost),
            **_common(names, row.currency, period, names.invoices.get((row.tenant_id, period))),
            **_what(row.model, name, row.tier, row.price_version),
            **_used_on(row.bucket, name),
            "ContractedUnitPrice": None if rates is None else _money(getattr(rates, name)),
            "ListUnitPrice": None if listed is None else _money(getattr(listed, name)),
            "PricingQuantity": _money(tokens),
            "PricingUnit": "1M Tokens",
            "ConsumedQuantity": tokens,
            "ConsumedUnit": "Tokens",
        }


async def _kept(conn: AsyncConnection, names: Names, start: int, end: int) -> AsyncIterator[dict[str, Any]]:
    """Yields rows of kept KV. They are under no key, as a cache keeps KV for a tenant. A price sheet has one rate for
    kept KV, which is its list price too."""
    async for one in residency_sums.by_bucket(conn, start, end, DAY_S):
        period = period_of(one.start)
        rates = await prices.residency_rates(conn, one.price_version, one.model)
        for token_class, kept in one.kept:
            place = residency_sums.CLASSES.index(token_class)
            price = None if rates is None else _money(rates[place])
            yield {
                **_account(names, one.tenant_id, None),
                **_costs(kept.amount, None),
                **_common(names, one.currency, period, names.invoices.get((one.tenant_id, period))),
                **_what(one.model, token_class, None, one.price_version),
                **_used_on(one.start, token_class),
                "ContractedUnitPrice": price,
                "ListUnitPrice": price,
                "PricingQuantity": Decimal(kept.byte_hours).scaleb(-9),
                "PricingUnit": "GB-Hours",
                "ConsumedQuantity": kept.byte_hours,
                "ConsumedUnit": "Byte-Hours",
            }


def _used_on(day: int, meter: str) -> dict[str, Any]:
    return {
        "ChargePeriodStart": _iso(day),
        "ChargePeriodEnd": _iso(day + DAY_S),
        "ChargeCategory": "Usage",
        "ChargeFrequency": "Usage-Based",
        "PricingCategory": "Standard",
        "SkuMeter": meter,
    }


async def _documents(conn: AsyncConnection, names: Names, start: int, end: int) -> AsyncIterator[dict[str, Any]]:
    """Yields what documents add to usage. The invoice of a month belongs to that month, and every other document to the
    month in which it was issued, so that consecutive exports have each row once."""
    is_first = and_(Invoice.series == invoice_numbers.INVOICE, Invoice.version == 1)
    query = (
        select(Invoice.__table__, InvoiceTerms.__table__, is_first.label("is_first"))
        .join(InvoiceTerms, InvoiceTerms.number == Invoice.number)
        .where(
            or_(
                and_(is_first, Invoice.until_ms > start * 1000, Invoice.until_ms <= end * 1000),
                and_(not_(is_first), Invoice.created_at >= start, Invoice.created_at < end),
            )
        )
        .order_by(Invoice.created_at, Invoice.number)
    )
    for document in (await conn.execute(query)).all():
        if document.number not in names.issuers:  # it was issued since the export began
            continue
        for line in await invoice_lines.of_invoice(conn, document.number):
            for row in _line(names, document, line):
                yield row
        extra = document.net - document.paid - document.total
        if document.tax_amount:
            text = f"Tax {document.tax}, {Decimal(document.tax_rate).scaleb(-4).normalize():f} %"
            yield _of_document(names, document, document.tax_amount, "Tax", text)
        if extra:
            text = "Rounding to whole units; the remainder is carried to the next document"
            yield _of_document(names, document, extra, "Adjustment", text)


def _line(names: Names, document: Any, line: Line) -> Iterable[dict[str, Any]]:
    """The rows by day have the usage under the first invoice of its month. What another document bills of it, such as
    usage that was posted late, is a row of that document; it is taken from the first invoice, or from what no invoice
    has where the month got none of its own, unless documents that cancel each other have it both."""
    what = _what(line.model or None, line.token_class or None, line.tier or None, line.price_version or None)
    if line.kind != "usage":
        category = "Credit" if line.kind == "prepaid" else "Adjustment"
        yield what | _of_document(names, document, line.amount, category, f"{line.kind} {line.note}".strip())
        return
    first = names.invoices.get((document.tenant_id, line.period))
    if not line.amount or document.number == first:
        return
    text = f"Usage of {line.period}, billed by {document.number}"
    yield what | _of_document(names, document, line.amount, "Adjustment", text)
    if document.is_first:
        moved = _of_document(names, document, -line.amount, "Adjustment", text)
        yield what | moved | {"InvoiceId": first, "InvoiceIssuerName": names.issuers[first]}


def _of_document(names: Names, document: Any, amount: int, category: str, text: str) -> dict[str, Any]:
    """Returns a row that belongs to a document as a whole."""
    period = document.period if document.is_first else period_of(document.created_at)
    start, end = bounds(period)
    is_correction = category == "Adjustment"
    return {
        **_account(names, document.tenant_id, None),
        **_costs(amount, amount),
        **_common(names, document.currency, period, document.number),
        "ChargePeriodStart": _iso(start),
        "ChargePeriodEnd": _iso(end),
        "ChargeCategory": category,
        "ChargeClass": "Correction" if is_correction else None,
        "ChargeFrequency": "One-Time",
        "ChargeDescription": text,
    }


def _account(names: Names, tenant_id: str, key_id: str | None) -> dict[str, Any]:
    return {
        "BillingAccountId": tenant_id,
        "BillingAccountName": names.tenants.get(tenant_id, ""),
        "BillingAccountType": "Tenant",
        "SubAccountId": key_id,
        "SubAccountName": None if key_id is None else names.keys.get(key_id, ""),
        "SubAccountType": None if key_id is None else "API key",
    }


def _costs(charge: int, list_cost: int | None) -> dict[str, Any]:
    costs: Mapping[str, Any] = dict.fromkeys(("BilledCost", "EffectiveCost", "ContractedCost"), _money(charge))
    return {**costs, "ListCost": _money(charge if list_cost is None else list_cost)}


def _common(names: Names, currency: str, period: str, number: str | None) -> dict[str, Any]:
    start, end = bounds(period)
    return {
        "BillingCurrency": currency,
        "PricingCurrency": currency,
        "InvoiceId": number,
        "InvoiceIssuerName": names.issuers[number],
        "ProviderName": names.issuers[number],
        "BillingPeriodStart": _iso(start),
        "BillingPeriodEnd": _iso(end),
        "ServiceCategory": "AI and Machine Learning",
        "ServiceSubcategory": "Generative AI",
        "ServiceName": "Headgate",
        "RegionId": None,
        "Tags": "{}",
        "ChargeClass": None,
        "x_batch_id": None,
    }


def _what(model: str | None, name: str | None, tier: str | None, price: str | None) -> dict[str, Any]:
    publisher = model.partition("/")[0] if model and "/" in model else None
    return {
        "ChargeDescription": ", ".join(filter(None, (model, name, tier))),
        "PublisherName": publisher,
        "SkuId": f"{model} {name}" if model and name else model,
        "SkuPriceId": price,
        "ResourceId": model,
        "ResourceType": "Model" if model else None,
        "x_tier": tier,
    }


def _in_order(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in COLUMNS)


def _money(millionths: int) -> Decimal:
    """Returns an exact decimal: micro-units become units, tokens become millions of tokens."""
    return Decimal(millionths).scaleb(-6)


def _iso(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
