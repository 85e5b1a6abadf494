"""The lease of one running request, extended before its output comes to the bound, and its worker told of each extension.

While the client does not read, nothing is extended, and the worker hears so, so that the sequence parks. The module knows
no text and no counts but the output's. A keeper does not hold its request, so that neither waits for the collector.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from gateway.base import errors
from gateway.metering.admission import Admitted
from gateway.metering.leases import LOW_WATER, Extension, LeaseLost
from gateway.telemetry.record import LeaseMark, LeaseResult

RETRY_S = 0.25
MAX_MARKS = 256
HOLD_MS = 10_000
"""The wait that the worker gets while the client does not read. It is below the 15 s of silence after which a worker
ends a parked sequence.
"""


class Told(Protocol):
    """The call to a worker, which is told of the lease."""

    def extend(self, bound: int, *, last: bool = False, wait_ms: int = 0) -> None: ...


class Spender(Protocol):
    """The request that spends the lease."""

    @property
    def call(self) -> Told | None: ...

    @property
    def num_received(self) -> int:
        """The number of output tokens so far."""
        ...

    @property
    def num_cached(self) -> int | None:
        """The cached tokens of its prompt, once they are known."""
        ...

    @property
    def draws(self) -> bool:
        """Whether output is still to come."""
        ...


class LeaseKeeper:
    def __init__(self, admitted: Admitted, most: int, fail: Callable[[errors.ApiError], None]) -> None:
        """No lease goes beyond `most` tokens. `fail` is called when the lease is lost."""
        self.marks: list[LeaseMark] = []
        """The first `MAX_MARKS` extensions."""
        self._admitted = admitted
        self._most = most
        self._fail = fail
        self._is_held = False
        self._task: asyncio.Task[None] | None = None
        """The newest task that extends; it may be done."""

    def keep(self, spender: Spender) -> None:
        """Begins to extend the lease if that is due."""
        if (self._task is None or self._task.done()) and self._is_due(spender):
            self._task = asyncio.create_task(self._extend_until_enough(spender))

    def hold(self, spender: Spender) -> None:
        """Called when the client does not read."""
        self._is_held = True
        if spender.call is not None:
            is_last = self._admitted.budget_stop is not None  # a message without it would take it back
            spender.call.extend(self._admitted.lease_bound, last=is_last, wait_ms=HOLD_MS)

    def release(self, spender: Spender) -> None:
        """Called when the client reads again."""
        if self._is_held:
            self._is_held = False
            self.keep(spender)

    def moved(self, spender: Spender) -> None:
        """Tells another worker, which was sent the present bound, what the one before knew besides."""
        if self._is_held:
            self.hold(spender)
        elif spender.call is not None and self._admitted.budget_stop is not None:
            spender.call.extend(self._admitted.lease_bound, last=True)
        self.keep(spender)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _is_due(self, spender: Spender) -> bool:
        bound = self._admitted.lease_bound
        return (
            not self._is_held
            and bound < self._most
            and bound - spender.num_received <= LOW_WATER
            and self._admitted.budget_stop is None
            and spender.draws
        )

    async def _extend_until_enough(self, spender: Spender) -> None:
        num_cached = spender.num_cached
        while self._is_due(spender):
            try:
                extension = await self._admitted.extend(spender.num_received, cached_tokens=num_cached)
            except LeaseLost:
                self._fail(errors.unavailable("lease_lost", "The request lost its lease."))
                return
            if extension is None:
                await asyncio.sleep(RETRY_S)
                continue
            self._note(extension)
            if spender.call is not None:
                spender.call.extend(extension.bound, last=extension.last, wait_ms=extension.wait_ms)
            if extension.last:
                return
            await asyncio.sleep(extension.wait_ms / 1000)

    def _note(self, extension: Extension) -> None:
        if len(self.marks) < MAX_MARKS:
            result: LeaseResult = "stopped" if extension.last else "waits" if extension.wait_ms else "granted"
            self.marks.append(LeaseMark(time.monotonic_ns(), extension.bound, result))
