"""Two months of three tenants, so that no screen of the console is empty: charges, logged requests, a budget, prices.

Charges are posted with the engine's records, so the books hold. The newest requests stand in the request log too, with
conversations, a turn that lost the cache, refusals and failures.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from money import posting, record

from accounting.access import api_keys
from accounting.database.db import Database
from accounting.prices import prices, pricing
from accounting.requests import label_usage, request_log, request_postings
from accounting.requests.request_log import LoggedRequest
from accounting.tenants import tenants
from accounting.terms import profiles
from accounting.values import periods, timelines
from accounting.values.timelines import entry
from accounting.values.types import Posting, Rates, Usage

DAY_MS = 86_400_000
NUM_DAYS = 50
NAMES = ("Field Survey", "Night Support", "Archive Search")
ISSUER = {
    "name": "Example Compute GmbH",
    "street": "Hauptstraße 1",
    "postal_code": "10115",
    "city": "Berlin",
    "country": "DE",
    "vat_number": "DE136695976",
    "email": "billing@example.com",
    "phone": "+49 30 123456",
    "iban": "DE89370400440532013000",
    "tax": "standard",
    "tax_rate": 190_000,
}
RATES = {
    "interactive": Rates(cache_read=60_000, cache_write=750_000, uncached=600_000, output=2_400_000),
    "batch": Rates(cache_read=30_000, cache_write=375_000, uncached=300_000, output=1_200_000),
}
SHEET = "history"


@dataclass(frozen=True)
class Owner:
    tenant_id: str
    key_id: str
    key: str
    weight: int
    """How much of the traffic is this tenant's."""


def last_month(now: float) -> str:
    """Returns the month that was over before this one began."""
    this = time.strftime("%Y-%m", time.gmtime(now))
    return time.strftime("%Y-%m", time.gmtime(periods.bounds(this)[0] - 1))


async def fill(
    database: Database, pepper: bytes, model: str, num_days: int = NUM_DAYS, seed: int = 5
) -> Sequence[Owner]:
    """Adds the tenants and what they did until now."""
    chance, now = random.Random(seed), time.time()
    began_ms = int(now * 1000) - num_days * DAY_MS
    owners = [await _owner(database, pepper, model, name, 3 - n, began_ms) for n, name in enumerate(NAMES)]
    made = sorted(_requests(owners, model, began_ms, num_days, chance), key=lambda one: one.opened_at_ms)
    async with database.write() as conn:
        await profiles.change_issuer(conn, ISSUER, now=int(now), actor="key_admin")
        for start in range(0, len(made), 500):
            part = made[start : start + 500]
            await request_postings.post_unshipped(conn, part)
            witnesses = [record(p.request_id, p.usage, tenant_id=p.tenant_id, root=p.root) for p in part]
            await request_postings.post_engine_records(conn, witnesses)
        rows = list(_rows(owners, model, int(now * 1000), chance))
        await label_usage.note(conn, rows)
        await request_log.add(conn, rows)
    return owners


async def _owner(database: Database, pepper: bytes, model: str, name: str, weight: int, began_ms: int) -> Owner:
    began = began_ms // 1000 - 60
    async with database.write() as conn:
        tenant = (await tenants.create(conn, name, now=began)).id
        key = await api_keys.create(conn, pepper, tenant_id=tenant, now=began, name=f"{name.lower()} app")
        sheet = f"{SHEET}-{weight}"
        await prices.create_sheet(conn, sheet, "USD", began)
        await prices.add_version(conn, sheet, {(model, tier): rates for tier, rates in RATES.items()}, began * 1000)
        await prices.assign(conn, tenant, sheet, began * 1000)
    return Owner(tenant, key.info.id, key.value, weight)


def _requests(
    owners: Sequence[Owner], model: str, began_ms: int, num_days: int, chance: random.Random
) -> Iterator[Posting]:
    for owner in owners:
        for day in range(num_days):
            # Traffic grows, and is low on two days of seven.
            busy = owner.weight * (6 + day // 8) * (0.4 if day % 7 > 4 else 1) * chance.uniform(0.7, 1.3)
            for _ in range(round(busy)):
                opened = began_ms + day * DAY_MS + chance.randrange(DAY_MS - 60_000)
                usage = Usage(
                    chance.randrange(40_000, 400_000),
                    chance.randrange(20_000),
                    chance.randrange(10_000, 120_000),
                    chance.randrange(2_000, 60_000),
                )
                tier = "batch" if chance.random() < 0.2 else "interactive"
                yield posting(
                    f"req_{opened:012x}{chance.getrandbits(80):020x}",
                    usage,
                    tenant_id=owner.tenant_id,
                    key_id=owner.key_id,
                    model=model,
                    tier=tier,
                    price_version=f"{SHEET}-{owner.weight}@1",
                    opened_at_ms=opened,
                    ended_at_ms=opened + 900,
                    charge=pricing.charge(usage, RATES[tier]),
                )


def _rows(owners: Sequence[Owner], model: str, now_ms: int, chance: random.Random) -> Iterator[LoggedRequest]:
    """Requests of the last 20 hours: conversations that grow, some refused and some failed."""
    for number in range(220):
        owner = chance.choices(owners, [owner.weight for owner in owners])[0]
        at_ms = now_ms - int(72_000_000 * (1 - number / 220)) + chance.randrange(200_000)
        turn, talk = number % 9, number // 9
        has_lost = turn == 5 and talk % 3 == 0
        prompt = 900 + turn * 420
        cached = 64 if has_lost else max(0, prompt - 420 if turn else 0) // 64 * 64
        kept = prompt // 64 * 64 - cached
        status, outcome, code = chance.choices(
            [(200, "ok", ""), (429, "refused", "rate_limit_exceeded"), (503, "server_error", "overloaded")], [93, 5, 2]
        )[0]
        is_ok = status == 200
        output = chance.randrange(40, 400) if is_ok else 0
        usage = Usage(cached, kept, prompt - cached - kept, output) if is_ok else Usage(0, 0, 0, 0)
        ttft = chance.randrange(90, 900)
        yield LoggedRequest(
            request_id=f"req_{at_ms:012x}{chance.getrandbits(80):020x}",
            is_tail=not is_ok,
            started_at_ms=at_ms,
            tenant_id=owner.tenant_id,
            key_id=owner.key_id,
            endpoint="POST /v1/chat/completions",
            model=model,
            tier="interactive",
            end_user=f"user-{chance.randrange(12)}",
            metadata={"team": chance.choice(("crops", "soil", "weather"))},
            is_stream=number % 3 == 0,
            status=status,
            outcome=outcome,
            error_code=code,
            finish_reason="stop" if is_ok else "",
            prompt_tokens=prompt,
            cached_tokens=cached if is_ok else 0,
            cache_write_tokens=kept if is_ok else 0,
            output_tokens=output,
            charge=pricing.charge(usage, RATES["interactive"]).total,
            currency="USD",
            ttft_ms=ttft if is_ok else None,
            duration_ms=ttft + output * 12 if is_ok else 3,
            worker="worker-0" if is_ok else "",
            miss_reason=("diverged" if has_lost else "cold") if is_ok else "",
            diverged_at_token=64 if has_lost and is_ok else None,
            trace_id=f"{chance.getrandbits(128):032x}",
            session_id=f"{owner.tenant_id[-4:]}-talk-{talk}",
            timeline=_timeline(ttft * 1000, (ttft + output * 12) * 1000, prompt - cached) if is_ok else "",
        )


def _timeline(first_us: int, end_us: int, num_computed: int) -> str:
    marks = {"accepted": 0, "authenticated": 180, "tokenized": 1_450, "admitted": 3_900, "dispatched": 4_300}
    ends = {
        "first_byte": first_us + 900,
        "finished": end_us + 1_300,
        "settled": end_us + 3_400,
        "last_byte": end_us + 3_500,
    }
    half = num_computed // 2
    return timelines.pack(
        [entry(name, at) for name, at in {**marks, **ends}.items()],
        [
            entry("queued", 11),
            entry("matched", first_us // 4, 9_001, 512),
            entry("chunk", first_us // 2, 9_001, half),
            entry("chunk", first_us - 4_400, 9_002, num_computed - half),
            entry("first_token", first_us - 4_300, 9_005),
            entry("finished", end_us - 4_300, 9_105),
        ],
    )
