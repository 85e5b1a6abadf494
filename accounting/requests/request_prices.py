"""Why a request costs what it costs: tokens, rates and amounts of its ledger entry. Every read is by primary key."""

from __future__ import annotations

from typing import cast

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import invoice_lines
from accounting.prices import prices
from accounting.requests.request_log import LoggedRequest
from accounting.tables.models import LedgerEntry
from accounting.values.types import TOKEN_CLASSES, Tier

OTHER_PROMPTS = "other_prompts"
"""The part for the further prompts of a request, which have their own ledger entries."""


class PricePart(msgspec.Struct, frozen=True):
    name: str
    """A token class, or `other_prompts`."""
    quantity: int
    """Tokens."""
    rate: int | None
    """Micro-units per million tokens; None for several prompts together."""
    amount: int
    """Micro-units, as the ledger has them: quantity times rate, rounded once over all classes."""


class RequestPrice(msgspec.Struct, frozen=True):
    version: str
    """The version of the price sheet, `<sheet>@<n>`."""
    currency: str
    parts: list[PricePart]
    is_reversed: bool
    """The charge was taken back later."""
    invoice: str | None
    """The number of the invoice that has the charge; None while no invoice has it."""
    invoice_period: str
    """The month of that invoice, or of the draft that has the charge so far."""

    @property
    def charge(self) -> int:
        return sum(part.amount for part in self.parts)


async def price_of(conn: AsyncConnection, one: LoggedRequest) -> RequestPrice | None:
    """Returns the parts of the request's charge; their sum is the charge. None if the ledger has no charge for it: it
    was refused, ended without a charge, or is not posted yet."""
    entries = {
        row.kind: row
        for row in await conn.execute(
            select(LedgerEntry.__table__).where(
                LedgerEntry.request_id == one.request_id, LedgerEntry.kind.in_(("settle", "reversal"))
            )
        )
    }
    entry = entries.get("settle")
    if entry is None:
        return None
    rates = await prices.rates_of(conn, entry.price_version, entry.model, cast(Tier, entry.tier))
    parts = [
        PricePart(name, getattr(entry, name), getattr(rates, name, None), getattr(entry, f"charge_{name}"))
        for name in TOKEN_CLASSES
    ]
    if one.charge > entry.charge:
        num_tokens = one.prompt_tokens + one.output_tokens - sum(part.quantity for part in parts)
        parts.append(PricePart(OTHER_PROMPTS, num_tokens, None, one.charge - entry.charge))
    place = await invoice_lines.place_of(conn, entry.tenant_id, entry.opened_at_ms, entry.posted_at_ms)
    return RequestPrice(entry.price_version, entry.currency, parts, "reversal" in entries, *place)
