"""Questions of `headgate up` to its gateways: whether they are ready, see the workers, and know the models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from gateway.base.checks import MODEL
from gateway.base.home import Home, HomeError
from gateway.base.settings import ModelSource
from gateway.cli.model import ServedModel
from gateway.cli.start_checks import LIMIT_S, told

POLL_S = 0.1
_SILENT = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


class GatewayProbes:
    def __init__(self, home: Home, num_gateways: int, news: Callable[[], str] = str) -> None:
        """`news` says how far the workers are, or nothing."""
        self._news = news
        self._home = home
        self._num_gateways = num_gateways
        self._awaited = "the gateways to start"
        """The thing that is not yet as it should be, for the operator."""

    async def wait(self, is_done: Callable[[int], Awaitable[bool]]) -> None:
        """Waits until `is_done` of every gateway's slot. Raises `HomeError` if that takes too long."""
        try:
            async with asyncio.timeout(LIMIT_S), told(self._said):
                for slot in range(self._num_gateways):
                    while not await self._answers(slot, is_done):  # noqa: ASYNC110 - another process has no event
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise HomeError(
                f"This took more than {LIMIT_S:.0f} s. It waits for {self._awaited}. The logs are in {self._home.logs}."
            ) from None

    def _said(self) -> str:
        return "; ".join(part for part in (self._awaited, self._news()) if part)

    async def serves(self, slot: int, num_workers: Mapping[str, int]) -> bool:
        """Says whether a gateway is ready and sees that number of workers of each model: then the first request succeeds."""
        body = await self._ask(slot)
        linked = body.get("workers", {})
        self._awaited = awaited(slot, num_workers, linked, body["checks"])
        return body["status"] in ("ok", "degraded") and not missing(num_workers, linked)

    async def knows(self, slot: int, models: Sequence[ServedModel]) -> bool:
        """Says whether a gateway serves exactly these models, read by these settings. One that could not read them
        serves what it had before.
        """
        self._awaited = f"gateway {slot} to read its models"
        wanted = {model.id: ModelSource.model_validate(model.source).digest for model in models}
        return bool((await self._ask(slot)).get("models") == wanted)

    async def draining(self) -> set[str]:
        """Returns the workers that some gateway sees draining. A gateway that does not answer sees none."""
        found: set[str] = set()
        for slot in range(self._num_gateways):
            with contextlib.suppress(*_SILENT):
                found |= set((await self._ask(slot)).get("draining", ()))
        return found

    async def _answers(self, slot: int, is_done: Callable[[int], Awaitable[bool]]) -> bool:
        try:
            return await is_done(slot)
        except _SILENT:
            self._awaited = f"gateway {slot} to start"
            return False

    async def _ask(self, slot: int) -> dict[str, Any]:
        path = str(self._home.run / f"gateway-{slot}.sock")
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
            session.get("http://gateway/readyz", timeout=aiohttp.ClientTimeout(total=2)) as answer,
        ):
            found: dict[str, Any] = await answer.json()
            return found


def missing(num_workers: Mapping[str, int], linked: Mapping[str, int]) -> list[str]:
    """Describes the models that a gateway has too few workers of."""
    return [
        f"{linked.get(name, 0)} of {number} workers of {name}"
        for name, number in num_workers.items()
        if linked.get(name, 0) < number
    ]


def awaited(
    slot: int, num_workers: Mapping[str, int], linked: Mapping[str, int], checks: Sequence[Mapping[str, str]]
) -> str:
    """Says what a gateway waits for: workers by model, and the messages of its other checks that fail. One that is degraded
    holds up nothing."""
    parts = ", ".join(missing(num_workers, linked))
    failing = [check for check in checks if check.get("state") == "failing"]
    messages = [check["message"] for check in failing if not check["name"].startswith(MODEL)]
    return ": ".join([f"gateway {slot}" + (f", which has {parts}" if parts else ""), *messages]).rstrip(".")
