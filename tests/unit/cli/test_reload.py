"""A reload that fails leaves what is served as it is."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import OperationalError

from accounting.database.db import DatabaseUnreachable
from gateway.base.home import HomeError
from gateway.cli.up import Up

FAULTS = [
    HomeError("No such model."),
    DatabaseUnreachable("The database cannot be used."),
    OperationalError("SELECT 1", {}, Exception("server closed the connection")),
    OSError(errno.EAGAIN, "Resource temporarily unavailable"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("is_writable", [True, False])
async def test_a_fault_of_a_reload_is_said_and_the_next_one_is_heard(tmp_path, fault, is_writable):
    said: list[str] = []

    async def reload() -> None:
        raise fault

    reloaded = tmp_path / ("." if is_writable else "missing") / "reloaded.json"
    up = SimpleNamespace(
        reload_asked=asyncio.Event(),
        models=(),
        home=SimpleNamespace(reloaded=reloaded),
        _reload=reload,
        _say=said.extend,
    )
    task = asyncio.create_task(Up._reload_when_asked(up))
    for num_heard in (1, 2):
        up.reload_asked.set()
        async with asyncio.timeout(30):
            while sum("stay as they were" in line for line in said) < num_heard:
                assert not task.done(), task.exception()
                await asyncio.sleep(0)
    assert reloaded.exists() == is_writable
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
