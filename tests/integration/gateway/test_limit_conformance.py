"""Forty cases about limits and charges, asked of this gateway by the runner that can be pointed at any other."""

from __future__ import annotations

from pathlib import Path

import limit_conformance
import pytest
from gateways import MODEL, running_gateway
from limit_conformance import CASES, Target
from provider import KEY, declared, price, running_provider

from gateway.upstreams.breaker import Breaker
from gateway.upstreams.market import MARKET


async def test_forty_of_forty_cases_hold_and_the_books_balance(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    told: list[str] = []
    async with running_provider() as provider:
        upstreams = {"mock": declared(provider)}
        upstreams["mock"]["models"]["unpriced"] = {"name": "theirs"}
        settings = {"upstreams": upstreams, "fallbacks": ("bought",)}
        async with running_gateway(tmp_path / "home", redis_url, **settings) as gateway:
            await price(gateway, "bought", "vectors")
            tenants = {gateway.keys.api_key: gateway.keys.tenant_id}
            tenant_id, poor = await gateway.new_tenant("poor")
            tenants[poor] = tenant_id
            async with gateway.session(gateway.keys.admin_key) as session:
                body = {"project_id": tenant_id, "period": "month", "limit_micro_units": 900}
                async with session.post("/admin/v1/budgets", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                tenant_id, hurried = await gateway.new_tenant("hurried")
                tenants[hurried] = tenant_id
                body = {"max_requests_per_1_minute": 1}
                async with session.patch(f"/admin/v1/tenants/{tenant_id}", json=body) as answer:
                    assert answer.status == 200, await answer.text()

            async def spend(key: str) -> int:
                await gateway.settled()
                statement = "SELECT coalesce(sum(charge), 0) FROM ledger_entry WHERE tenant_id = :t"
                [(charge,)] = await gateway.sql(statement, t=tenants[key])
                return int(charge)

            def between() -> None:
                for place in gateway.app[MARKET].places.values():
                    place.breaker = Breaker()
                    place.of_models.clear()

            target = Target(
                gateway.url,
                provider,
                gateway.keys.api_key,
                spend,
                unpriced_model="unpriced",
                fallback_model=MODEL,
                poor_key=poor,
                poor_budget=900,
                rate_key=hurried,
                vectors_model="vectors",
                between=between,
            )
            counts = await limit_conformance.run_all(
                target, lambda name, state, took: told.append(f"{took:.2f} s {name}: {state}")
            )
            await gateway.balanced()
    failures = [line for line in told if "failed" in line]
    assert not failures, "\n".join(failures)
    assert (counts, len(CASES)) == ((40, 0, 0), 40)


def test_the_cases_have_names_of_their_own() -> None:
    assert len({one.name for one in CASES}) == 40
