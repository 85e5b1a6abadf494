"""Reads adapters from files into memory, outside the engine thread; one at a time, and each once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from workers.engine.lora.adapter_table import AdapterRead
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import StepRunner
from workers.protocol.messages import AdapterCommand
from workers.protocol.reports import AdapterReport

logger = logging.getLogger(__name__)


class AdapterReader:
    """Reads the adapters that commands name. Its methods run on the event loop's thread."""

    def __init__(self, runner: StepRunner, deliver: Callable[[AdapterRead], None]) -> None:
        self.report = AdapterReport()
        """The engine's last report on adapters."""
        self._runner = runner
        self._deliver = deliver
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def read(self, command: AdapterCommand) -> None:
        known = {one.name for one in self.report.adapters if one.state != "failed"}
        if command.name not in known and command.name not in self._reading:
            self._reading[command.name] = asyncio.create_task(self._read(command))

    def close(self) -> None:
        for task in self._reading.values():
            task.cancel()

    async def _read(self, command: AdapterCommand) -> None:
        try:
            async with self._turn:
                self._deliver(await asyncio.to_thread(self._outcome, command))
        finally:
            del self._reading[command.name]

    def _outcome(self, command: AdapterCommand) -> AdapterRead:
        """Reads one file. A file may hold anything, but none may end the process."""
        try:
            return AdapterRead(command.name, self._runner.read_adapter(Path(command.path)))
        except ModelError as error:
            return AdapterRead(command.name, error)
        except Exception as error:
            logger.exception("an adapter cannot be read", extra={"event": "adapter_unreadable"})
            reason = f"The adapter {command.path} cannot be read: {type(error).__name__}."
            return AdapterRead(command.name, ModelError(reason))
