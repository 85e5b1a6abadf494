"""The one module that accepts a request; if a later step fails, it undoes in reverse order what the earlier ones took.

Order: metering works → the price is known → limits and first lease (`Reserved`) → journal OPEN, which names the version
of the worker's weights. `Admitted` has the second half: exactly one of `settle` and `void` ends a request. What must
happen even if the caller goes is done by `endings.py`. It knows prices only as integers handed on; no HTTP bodies, no
frames, no text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from accounting.database.db import Database
from accounting.prices import pricing
from accounting.values.clock import now_ms as _now_ms
from accounting.values.types import BoughtAttempt, Opened, Outcome, Posting, Price, Principal, RequestFacts, Tier, Usage
from gateway.base.errors import ApiError, database_unavailable, disk_full, price_unknown, unavailable
from gateway.base.redis_link import BooksUnavailable, LimiterUnavailable, NotSent
from gateway.journal.journal import Journal, JournalPoisoned
from gateway.limiter import limit_replies
from gateway.limiter.limits import Ladder, Limiter, ReservationEnded, Verdict
from gateway.limiter.rules import BudgetUse, LimitSubject, Subjects
from gateway.metering.endings import Endings, Noted, Settled
from gateway.metering.leases import Extension, Lease, ladder
from gateway.metering.metering_metrics import MeteringMetrics
from gateway.metering.price_cache import PriceCache, PricesUnknown
from gateway.metering.settlement import decide, unstored

log = logging.getLogger(__name__)


class Backlog(Protocol):
    @property
    def is_full(self) -> bool:
        """The backlog of unshipped postings is so large that no more may be admitted."""


class AdmissionRequest(msgspec.Struct, frozen=True):
    """A request as admission sees it."""

    facts: RequestFacts
    principal: Principal
    max_output_tokens: int
    """The bound over all choices."""
    price: Price | None = None
    """The price that a quote has bound. None means the price in force."""
    base: str = ""
    """The base of a model with an adapter, or of one that overflows. The base's limits bind the request, and the base's
    price holds if the model has none of its own.
    """


class Admission:
    def __init__(
        self,
        *,
        journal: Journal,
        limiter: Limiter,
        prices: PriceCache,
        database: Database,
        backlog: Backlog,
        metrics: MeteringMetrics,
    ) -> None:
        self.journal = journal
        self._metrics = metrics
        self.limiter = limiter
        self._prices = prices
        self.endings = Endings(journal, limiter, database, metrics)
        self._backlog = backlog
        self._subjects = Subjects()

    async def admit(self, ask: AdmissionRequest, root: str) -> Admitted:
        """Admits a request for a worker with this root. If it raises ApiError (429, 503) or is cancelled, it leaves
        nothing behind.
        """
        return await (await self.reserve(ask)).open(root)

    async def reserve(self, ask: AdmissionRequest) -> Reserved:
        """Takes what the request needs of its limits, before a worker is chosen. It leaves nothing behind if it fails,
        as `admit` does.
        """
        self._check_metering()
        facts = ask.facts
        price = ask.price or await self.price(facts.tenant_id, facts.model, facts.tier, base=ask.base)
        holder = self._subjects.of(
            facts.request_id,
            ask.principal,
            facts.model,
            facts.tier,
            base=ask.base,
            now_ms=_now_ms(),
            end_user=facts.user,
        )
        verdict = await self._reserve(ask, holder, price)
        lease = Lease(self.limiter, holder, price.rates, ask.max_output_tokens, verdict)
        return Reserved(self, facts, holder, price, lease, limit_replies.headers(holder, verdict, facts.endpoint))

    async def count(self, request_id: str, principal: Principal, model: str) -> dict[str, str]:
        """Counts one request of the rate limit that runs nothing. Returns the limiter's headers; raises `ApiError`."""
        holder = LimitSubject.of(request_id, principal, model, "interactive", now_ms=_now_ms())
        verdict = await self._take(holder, model, 0, 0, [])
        self.endings.detach(self.limiter.release(holder))
        return limit_replies.headers(holder, verdict)

    async def drain(self) -> None:
        """Waits until every ending that began is written, as `Endings.drain` does."""
        await self.endings.drain()

    def _check_metering(self) -> None:
        if not self.journal.is_writable:
            raise self.cannot_write()
        if self._backlog.is_full:
            raise database_unavailable("The database has taken no charges for too long.")

    def cannot_write(self) -> ApiError:
        """Returns the error for a journal that takes no OPEN."""
        if self.journal.is_full:
            return disk_full()
        return unavailable("metering_unavailable", "Usage cannot be recorded right now.", 2000)

    async def price(self, tenant_id: str, model: str, tier: Tier, *, base: str = "") -> Price:
        """Returns the price in force now. `base` is the model whose price holds if this one has none of its own. Raises
        `ApiError` 403 if there is no price.
        """
        try:
            price = await self._prices.price(tenant_id, model, tier)
            if price is None and base:
                price = await self._prices.price(tenant_id, base, tier)
        except PricesUnknown as reason:
            raise database_unavailable("Prices cannot be read right now.") from reason
        if price is None:
            raise price_unknown()
        return price

    async def _reserve(self, ask: AdmissionRequest, holder: LimitSubject, price: Price) -> Verdict:
        rungs = ladder(ask.max_output_tokens, price.rates)
        facts = ask.facts
        cost = pricing.prompt_reservation(facts.prompt_tokens, price.rates)
        return await self._take(holder, facts.model, facts.prompt_tokens, cost, rungs, facts.endpoint, price.currency)

    async def _take(
        self,
        holder: LimitSubject,
        model: str,
        num_prompt_tokens: int,
        cost: int,
        rungs: Ladder,
        endpoint: str = "",
        currency: str = "",
    ) -> Verdict:
        try:
            verdict = await self.limiter.reserve(holder, num_prompt_tokens, cost, rungs)
        except BaseException as reason:
            if not isinstance(reason, NotSent):  # the reply may be lost although the reservation was made
                self.endings.detach(self.limiter.release(holder, never_admitted=True))
            if not isinstance(reason, LimiterUnavailable | ReservationEnded):
                raise
            log.warning("limiter_unavailable", extra={"reason": str(reason)})
            if isinstance(reason, BooksUnavailable):
                raise database_unavailable(
                    "Rate limits must be read anew, and the database does not answer."
                ) from reason
            raise unavailable("limiter_unavailable", "Rate limits cannot be checked right now.") from reason
        for shadow in verdict.shadowed:
            self._metrics.shadow_refused(shadow)
        self._metrics.reserved(holder, verdict)
        if verdict.failing is not None:
            least = rungs[-1][0] if rungs else 0
            raise limit_replies.refused(holder, verdict, model, num_prompt_tokens, least, endpoint, currency)
        return verdict


class Reserved(msgspec.Struct, frozen=True):
    """A request within its limits. One of `open` and `release` must follow."""

    _admission: Admission
    _facts: RequestFacts
    _holder: LimitSubject
    _price: Price
    _lease: Lease
    _headers: dict[str, str]

    async def open(self, root: str) -> Admitted:
        """Writes OPEN, once the worker is chosen. `root` is the worker's (`Hello.root`). If it raises ApiError 503 or is
        cancelled, it leaves nothing behind.
        """
        admission = self._admission
        opened = Opened(
            **self._facts.lasting(),
            root=root,
            price_version=self._price.version,
            currency=self._price.currency,
            opened_at_ms=self._holder.opened_ms,
            reserved=self._lease.reserved,
            end_user=self._holder.end_user_place,
        )
        try:
            await admission.journal.open(opened)
        except JournalPoisoned as reason:
            self.release()
            admission.journal.forget(opened.request_id)
            raise admission.cannot_write() from reason
        except BaseException:
            # The OPEN is written nevertheless, so it gets its ending like any other.
            admission.endings.detach(self._undo(opened))
            raise
        return Admitted(admission, opened, self._holder, self._price, self._lease, self._headers)

    def release(self) -> None:
        """Gives everything back: the request does not even count as one."""
        self._admission.endings.detach(self._admission.limiter.release(self._holder, never_admitted=True))

    async def _undo(self, opened: Opened) -> None:
        await self._admission.limiter.release(self._holder, never_admitted=True)
        await self._admission.endings.record(opened.void("client_gone", "worker_crash", _now_ms()))


class Admitted:
    """A request that may run. One of `settle` and `void` must end it, and a second call raises."""

    def __init__(
        self,
        admission: Admission,
        opened: Opened,
        holder: LimitSubject,
        price: Price,
        lease: Lease,
        headers: dict[str, str],
    ) -> None:
        self.headers = headers
        """The limiter's headers, for every answer to this request."""
        self.price_version = price.version
        self._admission = admission
        self._opened = opened
        self._holder = holder
        self._price = price
        self._lease = lease
        self._has_ended = False

    @property
    def root(self) -> str:
        """The root of the worker that the request was opened for: no worker with another one may go on with it."""
        return self._opened.root

    @property
    def lease_bound(self) -> int:
        return self._lease.bound

    @property
    def lease_seq(self) -> int:
        return self._lease.seq

    @property
    def budget_stop(self) -> BudgetUse | None:
        """The budget that ends the request, once no more can be paid."""
        return self._lease.stop

    async def extend(self, num_received: int, *, cached_tokens: int | None = None) -> Extension | None:
        """Extends the lease. Call it with every delta, and again after `wait_ms`: it asks the limiter only when an
        extension is due. Pass `cached_tokens` from the first delta on, so that cached tokens stop counting. A result of
        None means that there is nothing to send to the worker. Raises LeaseLost when the limiter has failed for 15 s;
        the caller then voids with `lease_lost`.
        """
        counted = -1 if cached_tokens is None else self._opened.prompt_tokens - cached_tokens
        return await self._lease.extend(num_received, counted)

    def posting(
        self,
        outcome: Outcome,
        usage: Usage,
        engine_final: bool,
        *,
        max_output: int | None = None,
        bought: Sequence[BoughtAttempt] = (),
        is_unwitnessed: bool = False,
    ) -> Posting:
        """Returns the ending that such a request gets now, and writes nothing. settlement.py decides what is charged; its
        arguments are explained there.
        """
        ending = decide(outcome, usage, engine_final=engine_final, max_output=max_output, is_unwitnessed=is_unwitnessed)
        drifts = bool(bought) and ending.kind == "settle"
        why = "upstream_drift" if drifts else ending.write_off
        void = self._opened.void(ending.outcome, why, _now_ms(), self._lease.reserved)
        void = msgspec.structs.replace(void, bought=tuple(bought))
        if ending.kind == "void":
            return void
        charge = pricing.charge(ending.billed, self._price.rates)
        return msgspec.structs.replace(void, kind="settle", usage=ending.billed, charge=charge)

    def unstored(self, bought: Sequence[BoughtAttempt] = ()) -> Posting:
        """Returns the ending of a request whose answer could not be stored under its idempotency key: nobody pays."""
        return self.posting(unstored(self._opened), Usage(), False, bought=bought)

    def end(self, posting: Posting, noted: Noted | None = None) -> asyncio.Future[Settled]:
        """Ends the request durably, whatever becomes of the future. `noted` is called in the loop before the future has its
        result. The future raises what `noted` and `Endings.record` raise.
        """
        self._end_once()
        return self._admission.endings.end(self._holder, posting, noted)

    async def settle(
        self,
        outcome: Outcome,
        usage: Usage,
        engine_final: bool,
        *,
        max_output: int | None = None,
        bought: Sequence[BoughtAttempt] = (),
    ) -> Settled:
        """Ends the request as `posting` decides."""
        return await self.end(self.posting(outcome, usage, engine_final, max_output=max_output, bought=bought))

    async def void(self, outcome: Outcome, *, bought: Sequence[BoughtAttempt] = ()) -> Settled:
        """Ends the request without a charge. It equals `settle` with the same outcome, for callers that
        know no counts.
        """
        return await self.settle(outcome, Usage(), False, bought=bought)

    def _end_once(self) -> None:
        if self._has_ended:
            raise RuntimeError(f"{self._opened.request_id} has ended already")
        self._has_ended = True
