"""Binding quotes: a price version and a maximum, for one request of one tenant, for a minute, once. A quote reserves
nothing."""

from __future__ import annotations

import msgspec
from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.prices import prices
from accounting.tables.idempotency_models import Quote
from accounting.values.types import Price, Tier

LASTS_MS = 60_000


class Terms(msgspec.Struct, frozen=True):
    """The terms that a quote binds."""

    model: str
    price_version: str
    currency: str
    max_output_tokens: int
    """Output tokens of each choice; with several prompts, the highest of them."""
    max_charge: int


async def create(
    conn: AsyncConnection, quote_id: str, tenant_id: str, fingerprint: bytes, terms: Terms, expires_at_ms: int
) -> None:
    await conn.execute(
        insert(Quote).values(
            id=quote_id,
            tenant_id=tenant_id,
            fingerprint=fingerprint,
            expires_at_ms=expires_at_ms,
            **msgspec.structs.asdict(terms),
        )
    )


async def use(
    conn: AsyncConnection, quote_id: str, tenant_id: str, fingerprint: bytes, request_id: str, now_ms: int
) -> Terms | None:
    """Uses a quote. Returns None if it is unknown, another tenant's, for another body, used, or expired."""
    statement = (
        update(Quote)
        .where(
            Quote.id == quote_id,
            Quote.tenant_id == tenant_id,
            Quote.fingerprint == fingerprint,
            Quote.expires_at_ms > now_ms,
            Quote.used_by.is_(None),
        )
        .values(used_by=request_id)
        .returning(*(getattr(Quote, name) for name in Terms.__struct_fields__))
    )
    row = (await conn.execute(statement)).first()
    return None if row is None else Terms(*row)


async def price(conn: AsyncConnection, terms: Terms, tier: Tier) -> Price | None:
    rates = await prices.rates_of(conn, terms.price_version, terms.model, tier)
    return None if rates is None else Price(terms.price_version, terms.currency, rates)


async def give_back(conn: AsyncConnection, quote_id: str, request_id: str) -> None:
    """Frees a quote whose request was refused: it may be used again."""
    mine = Quote.id == quote_id, Quote.used_by == request_id
    await conn.execute(update(Quote).where(*mine).values(used_by=None))


async def forget(conn: AsyncConnection, now_ms: int) -> None:
    await conn.execute(delete(Quote).where(Quote.expires_at_ms < now_ms - LASTS_MS))
