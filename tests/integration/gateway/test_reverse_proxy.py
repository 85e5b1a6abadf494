"""S5, S6: a gateway with default settings behind a reverse proxy of one line: nothing of the operator's gets out, no
client chooses its address, and nobody's bad keys lock anybody out."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from gateways import RunningGateway, running_gateway, until
from proxies import NGINX, nginx, plain_proxy

from accounting.access import credentials
from gateway.http.auth import AUTH, BAD_KEYS_BURST, FRESH_S


@dataclass
class Behind:
    """A gateway and the proxy's address, all that clients see of it."""

    gateway: RunningGateway
    url: str

    async def status(self, path: str, key: str = "", **headers: str) -> int:
        if key:
            headers["authorization"] = f"Bearer {key}"
        async with aiohttp.ClientSession(self.url) as session, session.get(path, headers=headers) as answer:
            await answer.read()
            return answer.status


@pytest.fixture(params=["nginx", "plain"])
async def behind(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> AsyncIterator[Behind]:
    if request.param == "nginx" and NGINX is None:
        pytest.skip("nginx is not installed; the same runs behind a proxy written in Python")
    proxy = {"nginx": nginx, "plain": plain_proxy}[request.param]
    async with running_gateway(tmp_path / "home", redis_url) as gateway, proxy(tmp_path / "proxy", gateway.port) as url:
        yield Behind(gateway, url)


async def test_s6_metrics_are_nowhere_on_the_base_url(behind: Behind) -> None:
    keys = behind.gateway.keys
    assert await behind.status("/livez") == 200
    assert await behind.status("/metrics") == 401
    assert await behind.status("/metrics", keys.api_key) == 404
    assert await behind.status("/metrics", keys.admin_key) == 404
    for path in ("/drain", "/debug", "/metrics/"):
        assert await behind.status(path, keys.admin_key) == 404


async def test_s5_a_client_cannot_choose_its_address(behind: Behind, caplog: pytest.LogCaptureFixture) -> None:
    tenant, key = await behind.gateway.new_tenant("bound")
    [row] = await behind.gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=tenant)
    async with (
        behind.gateway.session(behind.gateway.keys.admin_key) as session,
        session.patch(f"/admin/v1/keys/{row.id}", json={"addresses": ["192.0.2.7"]}) as answer,
    ):
        assert answer.status == 200
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await behind.status("/v1/models", key, **{"x-forwarded-for": "192.0.2.7"}) == 401
    hints = [m for record in caplog.records if "A proxy at" in (m := record.getMessage())]
    assert len(hints) == 1, "the operator is told once"
    assert "HEADGATE_TRUSTED_NETWORKS" in hints[0]


async def test_s5_bad_keys_of_one_client_lock_out_no_other(behind: Behind) -> None:
    """Neither a key that was never seen here nor one that was idle for longer than it is remembered."""
    gateway = behind.gateway
    _, fresh = await gateway.new_tenant("fresh")
    assert await behind.status("/v1/models", gateway.keys.api_key) == 200
    now = time.monotonic()
    gateway.app[AUTH]._bad_keys._clock = lambda: now  # however long 120 requests take
    malformed = [f"sk-{i}" for i in range(BAD_KEYS_BURST)]
    unknown = [credentials.generate("live") for _ in range(BAD_KEYS_BURST)]
    statuses = [await behind.status("/v1/models", key) for key in [*malformed, *unknown]]
    assert (statuses[0], statuses[-1]) == (401, 429), "the throttle is at work"
    gateway.app[AUTH]._clock = lambda: time.monotonic() + FRESH_S + 1
    assert await behind.status("/v1/models", fresh) == 200
    assert await behind.status("/v1/models", gateway.keys.api_key) == 200


async def test_s5_all_clients_of_a_proxy_are_not_held_to_the_connections_of_one(behind: Behind) -> None:
    """The proxy counts as one address, and with it everybody behind it."""
    gateway = behind.gateway
    held = [await gateway.socket() for _ in range(gateway.settings.max_connections_per_address + 5)]
    server = gateway.runner.server
    assert server is not None
    await until(lambda: server.addresses.total == len(held))
    assert await behind.status("/v1/models", gateway.keys.api_key) == 200
    for _, writer in held:
        writer.close()
