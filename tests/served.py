"""A gateway with one scripted worker, whose tokens are bytes and whose grammars are compiled without a process of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fakes import VOCAB_SIZE, ScriptedRunner, ScriptedWorker
from gateways import RunningGateway, running_gateway
from inline_grammars import InlineGrammars
from redis_db import emptied


@contextlib.asynccontextmanager
async def served(
    directory: Path, redis_socket: Path, runner: ScriptedRunner | None = None, **settings: Any
) -> AsyncIterator[RunningGateway]:
    redis_url = emptied(redis_socket, 3)
    vocabulary = [bytes([i]) for i in range(256)] + [b""] * (VOCAB_SIZE - 256)
    worker = ScriptedWorker(
        directory / "w0.sock",
        redis_url=redis_url,
        runner=runner,
        grammars=InlineGrammars(vocabulary),
        journal_dir=directory / "w0",
    )
    async with running_gateway(directory / "home", redis_url, **settings) as gateway, worker:
        await gateway.workers(1)
        yield gateway
