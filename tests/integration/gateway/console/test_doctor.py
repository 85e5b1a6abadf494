"""The doctor's page: checks, versions and settings, for the operator alone and without secrets."""

from __future__ import annotations

import pytest
from console_pages import signed_in
from gateways import RunningGateway

from accounting.database import migrate
from workers.process import masked

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_operator_sees_checks_and_settings(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get("/doctor")
        assert (page.status, "Readiness ok" in page.words) == (200, True)
        assert "Workers of scripted 1 linked" in page.words
        checks = (await operator.get("/doctor?table=checks&format=csv")).text
        assert '"migrations","ok",""' in checks
        assert '"database","ok",""' in checks
        settings = (await operator.get("/doctor?table=settings&format=csv")).text
        assert f'"HEADGATE_HOME","{shared_gateway.settings.home}","yes"' in settings
    secret = (shared_gateway.settings.home / "secrets" / "pepper").read_text()
    assert secret not in page.text


async def test_a_database_out_of_step_is_named(shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "revision_of", lambda _: "0013")
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        assert "run `headgate migrate`" in (await operator.get("/doctor")).words


async def test_a_tenant_sees_nothing_of_it(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        page = await tenant.get("/doctor")
        assert (page.status, "HEADGATE_" in page.text, "Doctor</a>" in page.text) == (403, False, False)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (
            "postgresql+psycopg://user:pa%40ss@host/name?sslmode=require",
            "postgresql+psycopg://user:***@host/name?sslmode=require",
        ),
        ("postgresql://host/name?user=me&password=secret", "postgresql://host/name?user=me&password=***"),
        ("redis://:secret@host:6379/1", "redis://:***@host:6379/1"),
        ("unix:///run/redis.sock?db=3", "unix:///run/redis.sock?db=3"),
    ],
)
async def test_addresses_lose_their_secrets_and_nothing_else(address: str, shown: str) -> None:
    assert masked.text(address) == shown
