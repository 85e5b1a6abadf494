"""One gateway and one scripted worker per test, and what tests ask of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes import ScriptedWorker
from gateways import RunningGateway, running_gateway


@pytest.fixture
async def worker(tmp_path: Path, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url) as worker:
        yield worker


@pytest.fixture
async def bare_gateway(tmp_path: Path, redis_url: str) -> AsyncIterator[RunningGateway]:
    """Without any worker."""
    async with running_gateway(tmp_path / "home", redis_url) as gateway:
        yield gateway


@pytest.fixture
async def gateway(worker: ScriptedWorker, bare_gateway: RunningGateway) -> RunningGateway:
    await bare_gateway.workers(1)
    return bare_gateway
