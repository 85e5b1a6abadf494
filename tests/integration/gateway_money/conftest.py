"""A migrated ledger with a price, and requests for admission."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from migrated import migrated_database

from accounting.database.db import Database
from accounting.prices import prices
from accounting.values.types import Limits, Principal, Rates, RequestFacts
from gateway.metering.admission import AdmissionRequest

RATES = Rates(cache_read=1_000_000, cache_write=4_000_000, uncached=4_000_000, output=10_000_000)
"""1, 4, 4 and 10 micro-units per token: charges that a person can check."""


@pytest.fixture
async def books(database_url: str) -> AsyncIterator[Database]:
    """Both dialects, migrated, model `m` priced."""
    async for database in _priced(database_url):
        yield database


@pytest.fixture
async def sqlite_books(sqlite_url: str) -> AsyncIterator[Database]:
    async for database in _priced(sqlite_url):
        yield database


async def _priced(url: str) -> AsyncIterator[Database]:
    await migrated_database(url)
    database = Database(url)
    async with database.write() as conn:
        await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 1)
    yield database
    await database.close()


@pytest.fixture
def ask():
    def make(
        number: int,
        *,
        prompt: int = 100,
        output: int = 300,
        tenant: Limits | None = None,
        key: Limits | None = None,
        model: str = "m",
    ) -> AdmissionRequest:
        principal = Principal(
            "tenant", "proj_1", "key_1", frozenset(), tenant_limits=tenant or Limits(), key_limits=key or Limits()
        )
        facts = RequestFacts(
            request_id=f"req_{number:08d}",
            tenant_id="proj_1",
            key_id="key_1",
            model=model,
            tier="interactive",
            prompt_tokens=prompt,
        )
        return AdmissionRequest(facts, principal, output)

    return make
