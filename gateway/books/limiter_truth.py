"""Equation I13: for every budget row, the limiter's used amount equals the books, and its held amount equals that of
its open requests.

It only reads. Both sides change while they are read, so the first value of each side is compared with a later value of
the other. The limiter learns of an ending after it is durable, and neither side ever decreases without a rebuild. A
side that is behind for longer than 10 s has drifted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.books import equations
from accounting.books.equations import EquationResult
from accounting.database.db import Database
from accounting.limits import budgets, limiter_books, limiter_state, spend
from accounting.requests import request_postings
from accounting.values import clock
from accounting.values.budget_types import Budget, Period
from accounting.values.types import Posting
from gateway.base.redis_link import LimiterUnavailable, RedisLink
from gateway.journal.unshipped import ended_behind
from gateway.limiter.redis_keys import open_key, reservation_key, running_key, state_key
from gateway.limiter.rules import row_of

DRIFT_S = 10.0
LOOK_S = 0.5
TRIES = 20
"""The number of tries to read one tenant while requests come and go."""
AT_ONCE = 32
"""The number of tenants that are read in one round trip."""

Use = tuple[Budget, Period]


@dataclass(frozen=True)
class Row:
    """The limiter's values of one budget row, in micro-units."""

    epoch: int
    used: int
    held: int
    outstanding: int


async def limiter_equals_books(
    database: Database, link: RedisLink, journals: Mapping[int, Path], *, drift_s: float = DRIFT_S
) -> EquationResult:
    """Checks I13. `journals` maps slots to the journals of this machine. Nothing is checked without Redis, nor while a
    gateway is dead: the amount it held is an estimate until it is back, and on another host its journal may have
    endings that the books lack. A tenant whose epoch is over is left out until its next request has its state built
    anew.
    """
    try:
        async with database.read() as conn:
            uses = [] if await _is_anybody_dead(conn) else await _uses(conn)
        booked = await _booked(database, uses, journals)
        limited = await _limited(link, uses)
        uses = await _in_force(database, uses, limited)
        wrong = _differing(uses, booked, limited, booked, limited)
        until = time.monotonic() + drift_s
        while wrong and time.monotonic() < until:
            await asyncio.sleep(min(LOOK_S, drift_s))
            later = await _booked(database, uses, journals), await _limited(link, uses)
            # A charge may have been taken back meanwhile. The limiter hears of it by the new epoch.
            in_force, differing = await _in_force(database, wrong, limited), _differing(uses, booked, limited, *later)
            wrong = [use for use in in_force if use in differing]
        if wrong and await _is_host_lost(database, link, journals):
            return EquationResult(equations.LIMITER_EQUALS_BOOKS, 0, ())
    except LimiterUnavailable:
        return EquationResult(equations.LIMITER_EQUALS_BOOKS, 0, ())
    names = tuple(sorted(row_of(*use) for use in wrong))
    return EquationResult(equations.LIMITER_EQUALS_BOOKS, len(uses), names)


async def _is_anybody_dead(conn: AsyncConnection) -> bool:
    epochs = await limiter_state.epochs(conn)
    return bool(epochs) and await limiter_state.num_unlisted(conn, max(epochs.values())) > 0


async def _is_host_lost(database: Database, link: RedisLink, journals: Mapping[int, Path]) -> bool:
    """Says whether a gateway is dead whose journal is on another host. It is asked at the end, because Redis remembers
    one that was killed for as long as a difference is looked at.
    """
    async with database.read() as conn:
        elsewhere = await limiter_state.slots(conn) - journals.keys()
    num_running = await link.command("EXISTS", *map(running_key, elsewhere)) if elsewhere else 0
    return bool(num_running < len(elsewhere))


async def _in_force(database: Database, uses: Sequence[Use], limited: Mapping[str, Row]) -> list[Use]:
    """Returns those rows that the limiter has under their tenant's epoch."""
    async with database.read() as conn:
        epochs = await limiter_state.epochs(conn)
    of_all = epochs.get(None, 0)
    return [
        use
        for use in uses
        if (row := limited.get(row_of(*use))) is not None and row.epoch >= epochs.get(use[0].tenant_id, of_all)
    ]


async def _uses(conn: AsyncConnection) -> list[Use]:
    """Returns every budget with its current period."""
    now_ms = clock.now_ms()
    return [
        (budget, period)
        for of_tenant in (await budgets.of_all(conn)).values()
        for budget in of_tenant
        if (period := budget.period_at(now_ms)) is not None
    ]


async def _booked(database: Database, uses: Sequence[Use], journals: Mapping[int, Path]) -> dict[str, int]:
    """Returns the booked amount by row: settled requests, and those that ended and are not shipped. The journals are
    read first, so that nothing can be missed.
    """
    ended: list[Posting] = []
    for slot, directory in journals.items():
        async with database.read() as conn:
            offset = await request_postings.journal_offset(conn, slot) or 0
        ended += await asyncio.to_thread(ended_behind, directory, offset)
    async with database.read() as conn:
        known = await limiter_books.endings(conn, [posting.request_id for posting in ended])
        used = await spend.spent_of(conn, uses)
    waiting = [posting for posting in ended if posting.request_id not in known]
    return {
        row_of(budget, period): amount
        + sum(posting.charge.total for posting in waiting if _belongs(posting, budget, period))
        for (budget, period), amount in zip(uses, used, strict=True)
    }


def _belongs(posting: Posting, budget: Budget, period: Period) -> bool:
    return (
        posting.tenant_id == budget.tenant_id
        and budget.binds(posting.key_id, posting.model, posting.tier)
        and period.start_ms <= posting.opened_at_ms < period.end_ms
    )


async def _limited(link: RedisLink, uses: Sequence[Use]) -> dict[str, Row]:
    """Returns the limiter's rows that exist, by name. Raises LimiterUnavailable."""
    rows: dict[str, list[str]] = {}
    for budget, period in uses:
        rows.setdefault(budget.tenant_id, []).append(row_of(budget, period))
    found: dict[str, Row] = {}
    tenants = list(rows)
    for start in range(0, len(tenants), AT_ONCE):
        some = tenants[start : start + AT_ONCE]
        for known in await asyncio.gather(*(_of_tenant(link, t, rows[t]) for t in some)):
            found |= known
    return found


async def _of_tenant(link: RedisLink, tenant_id: str, rows: Sequence[str]) -> dict[str, Row]:
    body = msgspec.json.encode({"rows": rows})
    for _ in range(TRIES):
        names = await link.command("ZRANGE", open_key(tenant_id), 0, -1)
        held = [reservation_key(tenant_id, name.decode()) for name in names]
        keys = [state_key(tenant_id), open_key(tenant_id), *held]
        answer = await link.script("audit", keys, ("", body))
        if answer[0] == "none":
            return {}
        if answer[0] == "ok":
            epoch, numbers = answer[1], answer[2:]
            found = {row: Row(epoch, *numbers[3 * i : 3 * i + 3]) for i, row in enumerate(rows)}
            return {row: known for row, known in found.items() if known.used >= 0}
    return {}  # the tenant is too busy to be read; the next check may succeed


def _differing(
    uses: Sequence[Use],
    booked: Mapping[str, int],
    limited: Mapping[str, Row],
    booked_later: Mapping[str, int],
    limited_later: Mapping[str, Row],
) -> list[Use]:
    """Returns the rows in which a later value of one side is below the first value of the other. A row that was rebuilt
    meanwhile does not count.
    """

    def differs(row: str) -> bool:
        first, later = limited.get(row), limited_later.get(row)
        if first is None or later is None or first.epoch != later.epoch:
            return False
        if later.held != later.outstanding:
            return True
        return (later.used < booked[row] or booked_later[row] < first.used) and (later.used != booked_later[row])

    return [use for use in uses if differs(row_of(*use))]
