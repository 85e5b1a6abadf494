"""The load of metering.py: tenants with every kind of limit, and their requests' records. Measures, decides nothing."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from multidict import CIMultiDict

from accounting.access import api_keys
from accounting.access.principals import resolve
from accounting.database.db import Database
from accounting.lifecycle.bootstrap import EXAMPLE_RATES, bootstrap
from accounting.limits import budgets
from accounting.limits.budgets import NewBudget
from accounting.prices import pricing
from accounting.tenants import tenants
from accounting.values.types import Charge, Limits, Opened, Posting, Principal, RequestFacts, Usage
from gateway.base import ids
from gateway.base.errors import ApiError
from gateway.http.auth import Authenticator
from gateway.metering.admission import AdmissionRequest
from gateway.metering.metering import Metering

MODEL, ROOT, PEPPER = "model", "root", b"p" * 32
PRICE, CURRENCY = "standard@1", "USD"
MAX_AHEAD = 10_000
WRITERS = 256
LIMITS = Limits(requests_per_minute=10**7, tokens_per_minute=10**10, concurrency=10**6)
Percentiles = dict[str, float]


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Returns percentiles in ms."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": round(cuts[49] * 1000, 2), "p99": round(cuts[98] * 1000, 2), "max": round(max(seconds) * 1000, 2)}


class Load:
    """Requests of 20 to 800 tokens, made of a seed."""

    def __init__(self, principals: Sequence[Principal], seed: int) -> None:
        self._principals = principals
        self._rng = random.Random(seed)

    def request(self) -> tuple[Opened, Posting]:
        rng = self._rng
        principal = rng.choice(self._principals)
        usage = Usage(16 * rng.randrange(10), 16 * rng.randrange(10), rng.randrange(1, 17), rng.randrange(1, 400))
        now_ms = time.time_ns() // 1_000_000
        opened = Opened(
            request_id=ids.request_id(),
            tenant_id=principal.tenant_id,
            key_id=principal.key_id,
            model=MODEL,
            root=ROOT,
            tier="interactive",
            price_version=PRICE,
            currency=CURRENCY,
            opened_at_ms=now_ms,
            prompt_tokens=usage.cache_read + usage.cache_write + usage.uncached,
            reserved=10**6,
        )
        void = opened.void("ok", "internal", now_ms)
        charge = pricing.charge(usage, EXAMPLE_RATES["interactive"])
        return opened, _settle(void, usage, charge)

    def postings(self, count: int) -> list[Posting]:
        return [self.request()[1] for _ in range(count)]

    async def as_fast_as_shipped(self, metered: Metering, seconds: float) -> None:
        until = time.perf_counter() + seconds
        journal, shipper = metered.journal, metered.shipper

        async def write() -> None:
            while time.perf_counter() < until:
                while journal.durable_seq - shipper.offset > MAX_AHEAD:  # noqa: ASYNC110 - a rate, no event
                    await asyncio.sleep(0.01)
                opened, posting = self.request()
                await journal.open(opened)
                await metered.admission.endings.record(posting)

        await asyncio.gather(*(write() for _ in range(WRITERS)))

    async def burst(self, metered: Metering, num_records: int) -> None:
        """Posts endings alone."""
        left = iter(range(max(0, num_records)))

        async def write() -> None:
            for _ in left:
                await metered.admission.endings.record(self.request()[1])

        await asyncio.gather(*(write() for _ in range(WRITERS)))

    @contextmanager
    def arriving(self, metered: Metering, rate: float, *, with_lag: bool = True) -> Iterator[Arriving]:
        """Sends requests at a constant rate, whatever becomes of the ones before."""
        arriving = Arriving(self, metered, with_lag)
        task = asyncio.create_task(arriving.run(rate))
        try:
            yield arriving
        finally:
            task.cancel()


@dataclass
class Arriving:
    load: Load
    metered: Metering
    with_lag: bool
    settle_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, rate: float) -> None:
        began, sent = time.perf_counter(), 0
        while True:
            due = int((time.perf_counter() - began) * rate)
            for _ in range(due - sent):
                task = asyncio.create_task(self._one())
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            sent = due
            await asyncio.sleep(0.002)

    async def done(self) -> None:
        await asyncio.gather(*self._running)

    async def _one(self) -> None:
        opened, posting = self.load.request()
        await self.metered.journal.open(opened)
        began = time.perf_counter()
        await self.metered.admission.endings.record(posting)
        durable = time.perf_counter()
        self.settle_s.append(durable - began)
        if self.with_lag:
            await self.metered.shipper.caught_up()
            self.lag_s.append(time.perf_counter() - durable)


@dataclass
class Tenants:
    """Real rows, read as authentication reads them."""

    database: Database
    principals: list[Principal]
    api_keys: list[str]

    @classmethod
    async def make(cls, url: str, database: Database, count: int) -> Tenants:
        await bootstrap(url, PEPPER, {MODEL: EXAMPLE_RATES}, None)
        made = cls(database, [], [])
        for number in range(count):
            await made._add(f"tenant {number}")
        return made

    async def _add(self, name: str) -> None:
        now = int(time.time())
        async with self.database.write() as conn:
            tenant = await tenants.create(conn, name, now=now)
            await budgets.create(
                conn, NewBudget(tenant_id=tenant.id, limit_micro_units=10**15, period="month"), now=now
            )
            key = await api_keys.create(conn, PEPPER, tenant_id=tenant.id, now=now)
            principal = await resolve(conn, PEPPER, key.value, now)
        assert principal is not None
        self.api_keys.append(key.value)
        self.principals.append(_limited(principal))

    async def many(self, count: int) -> list[Principal]:
        """Returns principals like the first one under other ids, so that each has a state of its own."""
        first = self.principals[0]
        return [_named(first, f"proj_{number:032x}") for number in range(count)]

    async def admissions(self, metered: Metering, count: int) -> dict[str, object]:
        """Goes the way key → principal → all limits and the first lease → OPEN, one after the other."""
        by_key = dict(zip(self.api_keys, self.principals, strict=True))

        async def lookup(key: str) -> Principal | None:
            return by_key.get(key)

        auth = Authenticator(lookup, lambda key: True)
        times: list[float] = []
        num_refused = 0
        for number in range(count + len(self.api_keys)):
            key = self.api_keys[number % len(self.api_keys)]
            headers = CIMultiDict({"authorization": f"Bearer {key}"})
            began = time.perf_counter()
            principal = await auth.authenticate(headers, "127.0.0.1")
            try:
                admitted = await metered.admission.admit(_ask(principal), ROOT)
            except ApiError:  # Redis did not answer within 100 ms: a busy machine
                num_refused += 1
                await asyncio.sleep(1.1)
                continue
            times.append(time.perf_counter() - began)
            await admitted.void("internal")
            await metered.admission.drain()
        return {"admission_ms": percentiles(times[len(self.api_keys) :]), "num_refused": num_refused}

    async def admit_each(self, metered: Metering, principals: Sequence[Principal], at_once: int = 512) -> list[float]:
        left = list(principals)
        waits = []

        async def client() -> None:
            while left:
                principal = left.pop()
                began = time.perf_counter()
                while not await self._admitted(metered, principal):
                    pass
                waits.append(time.perf_counter() - began)

        await asyncio.gather(*(client() for _ in range(at_once)))
        return waits

    async def _admitted(self, metered: Metering, principal: Principal) -> bool:
        try:
            admitted = await metered.admission.admit(_ask(principal), ROOT)
        except ApiError as refusal:
            if refusal.status != 503:
                raise
            await asyncio.sleep(0.05)
            return False
        await admitted.void("internal")
        return True


def _settle(void: Posting, usage: Usage, charge: Charge) -> Posting:
    return msgspec.structs.replace(void, kind="settle", usage=usage, charge=charge)


def _limited(principal: Principal) -> Principal:
    """Every level has limits; none of them binds."""
    return msgspec.structs.replace(principal, key_limits=LIMITS, tenant_limits=LIMITS)


def _named(principal: Principal, tenant_id: str) -> Principal:
    return msgspec.structs.replace(principal, tenant_id=tenant_id, budgets=())


def _ask(principal: Principal) -> AdmissionRequest:
    facts = RequestFacts(
        request_id=ids.request_id(),
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        model=MODEL,
        tier="interactive",
        prompt_tokens=200,
    )
    return AdmissionRequest(facts, principal, 400)
