"""One gateway and one scripted worker, per test or per module, and what tests ask of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes import ScriptedWorker
from gateways import RunningGateway, running_gateway
from redis_db import emptied


@pytest.fixture(autouse=True, scope="module")
def rows_are_written_soon() -> Iterator[None]:
    """Many tests look for what they sent in the request log, or for what a worker counted of it, or for a prompt that they
    published."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.resources.EVERY_S", 0.2)
        patch.setattr("gateway.resources.PREFIX_EVERY_S", 0.1)
        patch.setattr("gateway.routing.links.worker_records.RECORDS_EVERY_S", 0.05)
        yield


@pytest.fixture
async def worker(tmp_path: Path, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0") as worker:
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


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """With a worker, for all tests of a module that only ask: nothing they do outlives them."""
    directory = tmp_path_factory.mktemp("gateway")
    redis_url = emptied(redis_socket, 3)
    async with (
        running_gateway(directory / "home", redis_url) as gateway,
        ScriptedWorker(directory / "w0.sock", redis_url=redis_url),
    ):
        await gateway.workers(1)
        yield gateway


@pytest.fixture
async def organization(gateway: RunningGateway) -> AsyncIterator[Any]:
    """`client.admin.organization`, with the operator's key."""
    async with gateway.operator() as client:
        yield client.admin.organization
