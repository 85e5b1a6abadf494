"""Unusual keys as the rollups show them, in both dialects."""

from __future__ import annotations

import pytest
from money import NOON_MS
from sqlalchemy import insert

from accounting.access import api_keys
from accounting.anomalies import anomalies
from accounting.ledger.rollups import KEYS, SUMS
from accounting.tables.models import RollupDay, RollupHour
from accounting.tenants import tenants

DAY_S, HOUR_S = 86_400, 3_600
HOUR = NOON_MS // 1000
NOW = HOUR + 600


@pytest.fixture
async def keys(conn, pepper) -> dict[str, tuple[str, str]]:
    """Tenant and key of two tenants; the keys are 100 days old."""
    made = {}
    for name in ("a", "b"):
        tenant = await tenants.create(conn, name, now=HOUR - 100 * DAY_S)
        key = await api_keys.create(conn, pepper, tenant_id=tenant.id, now=HOUR - 100 * DAY_S, name=f"of {name}")
        made[name] = tenant.id, key.info.id
    return made


async def used(conn, owner: tuple[str, str], hour: int, num_requests: int, charge: int, model: str = "m") -> None:
    row = dict.fromkeys((*KEYS, *SUMS), 0) | {
        "tenant_id": owner[0],
        "key_id": owner[1],
        "model": model,
        "tier": "interactive",
        "price_version": "standard@1",
        "currency": "USD",
        "num_requests": num_requests,
        "output": num_requests * 10,
        "charge": charge,
    }
    await conn.execute(insert(RollupHour).values(bucket=hour, **row))
    await conn.execute(insert(RollupDay).values(bucket=hour - hour % DAY_S, **row))


async def usual_past(conn, owner: tuple[str, str]) -> None:
    for day in range(1, 29):
        await used(conn, owner, HOUR - day * DAY_S, 100, 1_000_000)


async def test_a_key_that_does_more_on_a_new_model_is_found_and_a_usual_one_is_not(conn, keys):
    for owner in keys.values():
        await usual_past(conn, owner)
    await used(conn, keys["a"], HOUR, 600, 9_000_000, "large")
    await used(conn, keys["b"], HOUR, 110, 1_100_000)
    [found] = await anomalies.find(conn, NOW, 4)
    assert (found.tenant_id, found.key_id) == keys["a"]
    assert (found.tenant_name, found.key_name, found.currency, found.key_works) == ("a", "of a", "USD", True)
    assert (found.new_models, found.finding.suspicion) == (("large",), "leaked_key")
    assert (found.finding.hours, found.finding.observed.num_requests) == ((HOUR,), 600)
    assert (found.finding.requests.usual, found.finding.charge.usual) == (100, 1_000_000)
    assert await anomalies.find(conn, NOW, 4, keys["b"][0]) == []
    assert [one.key_id for one in await anomalies.find(conn, NOW, 4, keys["a"][0])] == [keys["a"][1]]


async def test_only_the_hours_that_are_asked_for_are_judged(conn, keys):
    await usual_past(conn, keys["a"])
    await used(conn, keys["a"], HOUR, 600, 9_000_000)
    assert await anomalies.find(conn, NOW + 3 * HOUR_S, 3) == []
    [found] = await anomalies.find(conn, NOW + 3 * HOUR_S, 4)
    assert found.new_models == ()


async def test_models_of_one_hour_add_up_and_the_worst_come_first(conn, keys):
    for owner in keys.values():
        await usual_past(conn, owner)
    for model in ("m", "n"):
        await used(conn, keys["a"], HOUR - HOUR_S, 200, 4_000_000, model)
    await used(conn, keys["b"], HOUR, 250, 9_000_000)
    found = await anomalies.find(conn, NOW, 4)
    assert [one.tenant_name for one in found] == ["a", "b"], "a leak before a rise in spending"
    assert found[0].finding.observed.num_requests == 400


async def test_an_empty_ledger_has_no_anomalies(conn):
    assert await anomalies.find(conn, NOW, 24) == []
