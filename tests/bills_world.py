"""A month of tenants who pay in several currencies, under several rules of tax, for tests of documents."""

from __future__ import annotations

import random

from billing_world import CLOSED_MS, END, PEPPER, PERIOD, START
from money import posting

from accounting.access import api_keys
from accounting.billing import credits, invoices
from accounting.billing.credits import NewCredit
from accounting.billing.invoices import InvoiceInfo
from accounting.database.db import Database
from accounting.prices import prices, pricing
from accounting.requests import request_postings
from accounting.tenants import tenants
from accounting.terms import profiles
from accounting.values.types import Rates, Usage, WitnessRecord

ISSUER = {
    "name": "Beispiel Rechenzentrum GmbH",
    "street": "Hauptstraße 1",
    "postal_code": "10115",
    "city": "Berlin",
    "country": "DE",
    "vat_number": "DE136695976",
    "tax_number": "30/123/45678",
    "company_number": "HRB 12345",
    "email": "billing@example.com",
    "phone": "+49 30 123456",
    "iban": "DE89370400440532013000",
    "bic": "COBADEFFXXX",
    "tax": "standard",
    "tax_rate": 190_000,
}
RATES = {"EUR": Rates(33_333, 1_250_001, 999_999, 3_333_337), "USD": Rates(40_000, 1_500_000, 1_200_000, 4_000_001)}


async def issuer(database: Database, **changes: object) -> None:
    async with database.write() as conn:
        await profiles.change_issuer(conn, ISSUER | changes, now=1, actor="key_admin")


async def tenant(database: Database, name: str, currency: str, **profile: object) -> str:
    """A tenant with a sheet of its currency and 30 requests in the month."""
    async with database.write() as conn:
        made = (await tenants.create(conn, name, now=1)).id
        key = (await api_keys.create(conn, PEPPER, tenant_id=made, now=1)).info.id
        sheet = f"sheet-{made[-12:]}"
        rates = RATES.get(currency, RATES["EUR"])
        await prices.create_sheet(conn, sheet, currency, 1)
        await prices.add_version(conn, sheet, {("m", "interactive"): rates}, 1000)
        await prices.assign(conn, made, sheet, 2000)
        if profile:
            await profiles.change_customer(conn, made, profile, now=1, actor="key_admin")
        await _requests(conn, made, key, f"{sheet}@1", currency, rates)
    return made


async def _requests(conn, tenant_id, key, version, currency, rates) -> None:
    chance = random.Random(tenant_id[:3] + currency)
    made = []
    for number in range(30):
        usage = Usage(*(chance.randrange(50_000) for _ in range(4)))
        opened = chance.randrange(START * 1000, END * 1000)
        made.append(
            posting(
                f"req_{tenant_id}_{number}",
                usage,
                tenant_id=tenant_id,
                key_id=key,
                model="m",
                price_version=version,
                currency=currency,
                opened_at_ms=opened,
                ended_at_ms=opened + 5,
                charge=pricing.charge(usage, rates),
            )
        )
    await request_postings.post(conn, random.randrange(100, 2**30), 1, made, now_ms=END * 1000)
    seen = [
        WitnessRecord(
            worker="w", seq=1, request_id=one.request_id, attempt=0, tenant_id=tenant_id, root="r", usage=one.usage
        )
        for one in made
    ]
    await request_postings.post_engine_records(conn, seen, now_ms=END * 1000)


async def credit(database: Database, tenant_id: str, amount: int, **fields: object):
    wanted = NewCredit(**{"type": "grant", "tenant_id": tenant_id, "amount": amount, "starts_at": START, **fields})
    async with database.write() as conn:
        made, _ = await credits.create(conn, wanted, key=repr(wanted), now_ms=CLOSED_MS, actor="key_admin")
    return made


async def close(database: Database, tenant_id: str, **changes: object) -> InvoiceInfo:
    return await invoices.close(database, tenant_id, PERIOD, **{"now_ms": CLOSED_MS, "actor": "key_admin", **changes})
