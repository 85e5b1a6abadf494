"""Sums of the tokens that were written off, by reason and by tenant, and which tenants lose more than an alarm allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import get_args

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.ledger import rollups
from accounting.ledger.legs import COUNTED
from accounting.tables.models import LedgerEntry
from accounting.values.types import OPERATOR_TENANT, WriteOffReason

REASONS: tuple[WriteOffReason, ...] = get_args(WriteOffReason)
EXPECTED: tuple[WriteOffReason, ...] = ("speculation", "recompute")
"""The reasons of tokens that an engine computes in vain by intention: they are no loss of a tenant's work."""
ALARM_SHARE = 0.01
ALARM_TOKENS = 1_000
"""The written-off tokens of a tenant below which there is no alarm: one lost answer is 1 % of many a tenant's hour."""
WINDOW_S = 3_600
MAX_NAMED = 20
"""The number of tenants that are named in one place. The ones that lose most come first."""

Sums = Mapping[tuple[str, str], int]
"""Tokens by tenant and reason."""


class TenantLoss(msgspec.Struct, frozen=True):
    """One tenant of whose tokens more was written off than an alarm allows."""

    tenant_id: str
    num_tokens: int
    share: float
    """The part of all tokens that were computed for the tenant, 0 to 1."""
    reason: str
    """The reason for most of them."""


async def written_off(conn: AsyncConnection, since_ms: int, until_ms: int) -> dict[tuple[str, str], int]:
    """Returns the tokens by tenant and reason whose write-off was posted in [since, until)."""
    tokens = sum((getattr(LedgerEntry, name) for name in COUNTED[1:]), getattr(LedgerEntry, COUNTED[0]))
    query = (
        select(LedgerEntry.tenant_id, LedgerEntry.kind, func.sum(tokens))
        .where(LedgerEntry.posted_at_ms >= since_ms, LedgerEntry.posted_at_ms < until_ms)
        .where(LedgerEntry.kind.in_(REASONS))
        .group_by(LedgerEntry.tenant_id, LedgerEntry.kind)
    )
    return {(tenant_id, kind): int(number) for tenant_id, kind, number in await conn.execute(query)}


def by_reason(found: Sums) -> dict[str, int]:
    sums = Counter[str]()
    for (_, reason), number in found.items():
        sums[reason] += number
    return dict(sums)


def window_start_ms(now_ms: int) -> int:
    """Returns the start of the hours that are judged: the running one and the one before, as sums are kept by hours."""
    return rollups.bucket_of("1h", now_ms // 1000 - WINDOW_S) * 1000


async def recent_losses(conn: AsyncConnection, now_ms: int) -> list[TenantLoss]:
    """Returns the same as `losses`, for whoever has not kept what was written off."""
    start_ms = window_start_ms(now_ms)
    return await losses(conn, await written_off(conn, start_ms, now_ms), start_ms)


async def losses(conn: AsyncConnection, found: Sums, since_ms: int) -> list[TenantLoss]:
    """Returns the tenants of whose tokens more was written off since `since_ms` than an alarm allows, the ones that lose
    most first. `found` is what was written off from then on.
    """
    lost = lost_of_tenants(found)
    if not lost:
        return []
    return judged(lost, await rollups.tokens_of(conn, "1h", since_ms // 1000, lost.keys()))


def lost_of_tenants(found: Sums) -> dict[str, dict[str, int]]:
    """Returns the tokens by reason of each tenant that lost so many that it may be an alarm."""
    lost: dict[str, dict[str, int]] = {}
    for (tenant_id, reason), number in found.items():
        if reason not in EXPECTED and tenant_id != OPERATOR_TENANT:
            lost.setdefault(tenant_id, {})[reason] = number
    return {tenant_id: reasons for tenant_id, reasons in lost.items() if sum(reasons.values()) >= ALARM_TOKENS}


def judged(lost: Mapping[str, Mapping[str, int]], charged: Mapping[str, int]) -> list[TenantLoss]:
    """Returns those of `lost` whose share is above the alarm's. `charged` are the tokens that tenants are charged for."""
    made = []
    for tenant_id, reasons in lost.items():
        num_lost = sum(reasons.values())
        share = num_lost / (num_lost + max(0, charged.get(tenant_id, 0)))
        if share > ALARM_SHARE:
            made.append(TenantLoss(tenant_id, num_lost, share, max(reasons, key=lambda one: (reasons[one], one))))
    return sorted(made, key=lambda loss: (-loss.num_tokens, loss.tenant_id))
