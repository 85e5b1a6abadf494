"""FOCUS 1.2 (FinOps Open Cost and Usage Specification) rows. There is one row per day, key, model, tier and token
class; one per day, tenant, model and class of kept KV; and one for each credit note or adjustment. Money is a decimal
of exact micro-units.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import invoice_numbers as numbers
from accounting.billing import residency_sums
from accounting.database.db import Database
from accounting.exports import exports
from accounting.prices import price_lists, prices, pricing
from accounting.prices.prices import DEFAULT_SHEET
from accounting.prices.repricing import RatesByVersion
from accounting.tables.invoice_models import Invoice, InvoiceLine
from accounting.tables.models import ApiKey, Tenant
from accounting.values.errors import NotFoundError
from accounting.values.periods import DAY_S, bounds, period_of
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


DECIMALS = frozenset(
    {
        "BilledCost",
        "EffectiveCost",
        "ContractedCost",
        "ListCost",
        "ContractedUnitPrice",
        "ListUnitPrice",
        "PricingQuantity",
    }
)
INTEGERS = frozenset({"ConsumedQuantity"})


class Names:
    """Names of tenants and keys, invoice numbers and list prices, all read once."""

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer
        self.tenants: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.invoices: dict[tuple[str, str], str] = {}
        self.rates = RatesByVersion()
        self._list: list[price_lists.SheetVersion] = []

    async def read(self, conn: AsyncConnection) -> None:
        self.tenants = {row.id: row.name for row in await conn.execute(select(Tenant.id, Tenant.name))}
        for key_id, name in await conn.execute(select(ApiKey.id, ApiKey.name)):
            self.keys[key_id] = name or ""
        query = select(Invoice.tenant_id, Invoice.period, Invoice.number)
        for tenant, period, number in await conn.execute(query.where(Invoice.series == numbers.INVOICE)):
            self.invoices[(tenant, period)] = number
        try:
            self._list = await price_lists.versions_of(conn, DEFAULT_SHEET)
        except NotFoundError:
            self._list = []

    def list_rates(self, second: int, model: str, tier: Tier) -> Rates | None:
        """Return the rates of the default sheet that were in force when the day began. For a day before the first
        version they are those of the first version."""
        for version in reversed(self._list):
            if version.from_ms <= second * 1000 or version is self._list[0]:
                return next((r.rates for r in version.rates if (r.model, r.tier) == (model, tier)), None)
        return None


async def rows(
    database: Database, start: int, end: int, issuer: str, page_rows: int = exports.PAGE_ROWS
) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Yield pages of rows in the order of `COLUMNS`: usage by day, then kept KV by day, then corrections."""
    names = Names(issuer)
    async with database.read() as conn:
        await names.read(conn)
    async for page in exports.usage_rows(database, start, end, page_rows):
        made = []
        async with database.read() as conn:
            for row in page:
                rates = await names.rates.of(conn, row.price_version, row.model, row.tier)
                made += [_in_order(values) for values in _usage(names, row, rates)]
        yield made
    for others in (_kept, _corrections):
        async with database.read() as conn:
            made = [_in_order(values) async for values in others(conn, names, start, end)]
        if made:
            yield made


def _usage(names: Names, row: Any, rates: Rates | None) -> Iterable[dict[str, Any]]:
    listed = names.list_rates(row.bucket, row.model, row.tier)
    period = period_of(row.bucket)
    for name in TOKEN_CLASSES:
        tokens, charge = getattr(row, name), getattr(row, f"charge_{name}")
        if not tokens:
            continue
        list_cost = None
        if listed is not None:
            list_cost = getattr(pricing.charge(Usage(**{name: tokens}), listed), name)
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
    """Yield rows of kept KV. They are under no key, as a cache keeps KV for a tenant. A price sheet has one rate for
    kept KV, which is its list price too."""
    async for one in residency_sums.by_bucket(conn, start, end, DAY_S):
        period = period_of(one.start)
        rates = await prices.residency_rates(conn, one.price_version, one.model)
        place = residency_sums.CLASSES.index(one.token_class)
        price = None if rates is None else _money(rates[place])
        yield {
            **_account(names, one.tenant_id, None),
            **_costs(one.kept.amount, None),
            **_common(names, one.currency, period, names.invoices.get((one.tenant_id, period))),
            **_what(one.model, one.token_class, None, one.price_version),
            **_used_on(one.start, one.token_class),
            "ContractedUnitPrice": price,
            "ListUnitPrice": price,
            "PricingQuantity": Decimal(one.kept.byte_hours).scaleb(-9),
            "PricingUnit": "GB-Hours",
            "ConsumedQuantity": one.kept.byte_hours,
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


async def _corrections(conn: AsyncConnection, names: Names, start: int, end: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the lines of documents that were issued in [start, end): credits, corrections and payments by grants."""
    query = (
        select(InvoiceLine.__table__, Invoice.tenant_id, Invoice.currency, Invoice.created_at)
        .join(Invoice, Invoice.number == InvoiceLine.number)
        .where(InvoiceLine.kind != "usage")
        .where(Invoice.created_at >= start, Invoice.created_at < end)
        .order_by(Invoice.created_at, InvoiceLine.number, InvoiceLine.line_no)
    )
    for row in await conn.execute(query):
        is_credit = row.kind == "prepaid"
        yield {
            **_account(names, row.tenant_id, None),
            **_costs(row.amount, row.amount),
            **_common(names, row.currency, row.period, row.number),
            **_what(row.model or None, None, row.tier or None, row.price_version or None),
            "ChargePeriodStart": _iso(row.created_at),
            "ChargePeriodEnd": _iso(row.created_at + 1),
            "ChargeCategory": "Credit" if is_credit else "Adjustment",
            "ChargeClass": None if is_credit else "Correction",
            "ChargeFrequency": "One-Time",
            "ChargeDescription": f"{row.kind} {row.note}".strip(),
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
        "InvoiceIssuerName": names.issuer,
        "ProviderName": names.issuer,
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
    """Exact decimal: micro-units become units, tokens become millions of tokens."""
    return Decimal(millionths).scaleb(-6)


def _iso(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
