"""Reads what providers bill by the day, for the upstreams that declare a cost API: every hour, and when an operator asks.

A pull is claimed in SQL, so that one gateway makes it. It is written as a whole or not at all, and a failed one is left to
the next hour. Its requests obey the rules of all requests to upstreams (`gateway/upstreams/exchange.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from accounting.upstreams import cost_days, cost_pulls
from accounting.upstreams.cost_days import DaySums
from accounting.upstreams.cost_pulls import TOO_MANY_LINES, Claim, DayCost, Pull, Written
from accounting.values import clock
from accounting.values.periods import DAY_S, date_of
from gateway.base.lifecycle import uninterrupted
from gateway.upstreams import exchange
from gateway.upstreams.exchange import AttemptFailed
from gateway.upstreams.market import Market
from gateway.upstreams.outcomes import Fault
from gateway.upstreams.wires import cost_pages
from gateway.upstreams.wires.cost_pages import Report
from gateway.upstreams.wires.values import Garbage, Upstream

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
PERIOD_MS = 3_600_000
"""The time between two pulls of an upstream."""
PULL_S = 120.0
"""The longest time of a whole pull; it ends long before its claim."""
PAGE_S = 30.0
PAGE_BYTES = 4 * 1024 * 1024
SHOWN_DAYS = 31
"""The days whose drift the metrics show."""


class PullRunning(Exception):
    """Another pull of the upstream is under way."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The end of a pull."""

    num_lines: int = 0
    num_changed: int = 0
    fault: str = ""
    """A fixed word for the reason of a failure; empty if all was read."""


@dataclass(frozen=True, slots=True)
class CostFigures:
    """An upstream's pulls and the drift of its last days, for metrics."""

    state: Pull
    sums: DaySums


class CostPuller:
    def __init__(self, market: Market, database: Database) -> None:
        self._market = market
        self._database = database
        self.figures: Mapping[str, CostFigures] = {}
        self.ended: Counter[tuple[str, str]] = Counter()
        """The pulls of this process by upstream and end: `pulled`, or the word for the failure."""

    async def look(self) -> None:
        """Pulls where it is time, and reads the figures anew if there was a pull, here or in another gateway. What SQL
        refuses of one upstream is logged, and holds up no other. Raises SQLAlchemyError, OSError.
        """
        declared = self._declared()
        if not declared:
            self.figures = {}
            return
        for name, state in (await uninterrupted(self._states(declared))).items():
            if clock.now_ms() - state.tried_at_ms < PERIOD_MS:
                continue
            try:
                claimed = await uninterrupted(self._claim(name, PERIOD_MS))
                if claimed is not None:
                    await self._pull(declared[name], claimed, "")
            except (SQLAlchemyError, OSError) as failure:
                logger.error("upstream_costs_not_written", exc_info=failure, extra={"upstream": name})
        await uninterrupted(self._refresh())

    async def pull(self, upstream: Upstream, actor: str) -> Pulled:
        """Pulls now. Raises `PullRunning`, and what SQL raises."""
        claimed = await uninterrupted(self._claim(upstream.name))
        if claimed is None:
            raise PullRunning
        pulled = await self._pull(upstream, claimed, actor)
        await uninterrupted(self._refresh())
        return pulled

    def _declared(self) -> dict[str, Upstream]:
        places = self._market.places.items()
        return {name: place.upstream for name, place in places if place.upstream.source.costs is not None}

    async def _states(self, names: Collection[str]) -> Mapping[str, Pull]:
        async with self._database.read() as conn:
            return await cost_pulls.states(conn, names)

    async def _claim(self, name: str, period_ms: int = 0) -> Claim | None:
        async with self._database.write() as conn:
            return await cost_pulls.claim(conn, name, period_ms=period_ms)

    async def _pull(self, upstream: Upstream, claimed: Claim, actor: str) -> Pulled:
        try:
            async with asyncio.timeout(PULL_S):
                costs = await self._read(upstream, claimed)
        except (AttemptFailed, TimeoutError) as failure:
            why = _word(failure.fault) if isinstance(failure, AttemptFailed) else "stalled"
            return await self._failed(claimed, why, actor)
        written = await uninterrupted(self._write(claimed, costs, actor))
        if written is None:
            return self._not_pulled(upstream.name, "claim_ended")
        if written.num_changed:
            logger.info("upstream_costs_pulled", extra={"upstream": upstream.name, "num_changed": written.num_changed})
        if written.full_days:
            days = [date_of(day) for day in written.full_days]
            logger.warning("upstream_days_full", extra={"upstream": upstream.name, "days": days})
            return replace(self._not_pulled(upstream.name, TOO_MANY_LINES), num_changed=written.num_changed)
        self.ended[upstream.name, "pulled"] += 1
        return Pulled(len(costs), written.num_changed)

    async def _write(self, claimed: Claim, costs: Sequence[DayCost], actor: str) -> Written | None:
        async with self._database.write() as conn:
            return await cost_pulls.succeeded(conn, claimed, costs, actor=actor)

    async def _failed(self, claimed: Claim, why: str, actor: str) -> Pulled:
        pulled = self._not_pulled(claimed.upstream, why)
        await uninterrupted(self._fail(claimed, why, actor))
        return pulled

    def _not_pulled(self, upstream: str, why: str) -> Pulled:
        logger.warning("upstream_costs_not_pulled", extra={"upstream": upstream, "why": why})
        self.ended[upstream, why] += 1
        return Pulled(fault=why)

    async def _fail(self, claimed: Claim, why: str, actor: str) -> None:
        async with self._database.write() as conn:
            await cost_pulls.failed(conn, claimed, why, actor=actor)

    async def _read(self, upstream: Upstream, claimed: Claim) -> list[DayCost]:
        """Reads all pages. Raises `AttemptFailed`."""
        costs, kind = upstream.source.costs, upstream.source.kind
        assert costs is not None, "a pull of an upstream without a cost API"
        api, report, token = cost_pages.api_of(kind), Report(), ""
        try:
            while True:
                asked = api.request(upstream, claimed.since, claimed.until, token)
                data = await exchange.page(self._market.session, asked, upstream, PAGE_S, PAGE_BYTES)
                found = await asyncio.to_thread(api.page, data, costs)
                report.add(found)
                if not (token := found.next_page):
                    # Exact sums of many lines take longer than the loop may stand still.
                    return await asyncio.to_thread(report.costs, claimed.since, claimed.until)
        except Garbage as garbage:
            raise exchange.failure_of(garbage) from None

    async def _refresh(self) -> None:
        """Reads the figures anew if there was a pull. Days of a month are not added up each minute."""
        states = await self._states(self._declared())
        if states == {name: found.state for name, found in self.figures.items()}:
            return
        today = clock.now_ms() // 1000 // DAY_S * DAY_S
        async with self._database.read() as conn:
            days = await cost_days.compare(conn, states, today - SHOWN_DAYS * DAY_S)
        self.figures = {name: CostFigures(state, cost_days.sums(days.get(name, ()))) for name, state in states.items()}


def _word(fault: Fault) -> str:
    """Returns the word for a failure. One that is about a model of the upstream is about the address here."""
    return "not_found" if fault.blame == "no_model" else fault.reason


COST_PULLER = web.AppKey("cost_puller", CostPuller)
