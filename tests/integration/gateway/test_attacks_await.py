"""A failure at every `await` of a handler, one after the other: nothing stays reserved and the books agree (security.md
section 8, D10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Literal, cast

import aiohttp
import pytest
from aiohttp import web
from gateways import MODEL, RunningGateway, until

from accounting.tenants import tenants
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE, DETACHED
from gateway.generation.stream import GENERATION
from gateway.idempotency import idempotency
from gateway.metering.metering import METERING

Failure = Literal["before", "after", "cancelled"]
"""The awaited thing fails and is not waited for; it fails once it is done; the client has left meanwhile."""

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "body": ("/v1/chat/completions", CHAT),
    "stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "keyed": ("/v1/chat/completions", CHAT),
    "prompts": ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "n": 2, "max_tokens": 3}),
    "response": ("/v1/responses", {"model": MODEL, "input": "hello there", "max_output_tokens": 3, "store": True}),
    "messages": ("/v1/messages", {"model": MODEL, "messages": CHAT["messages"], "max_tokens": 3, "stream": True}),
}
CASES: list[tuple[str, Failure]] = [
    (name, failure)
    for name in REQUESTS
    for failure in ("before", "after", "cancelled")
    if (name, failure) != ("keyed", "cancelled")  # nothing cancels the task of a keyed request
]
MOST_AWAITS = 400


class Planted(Exception):
    """A fault that no handler expects."""


class FailingAt:
    """Runs a handler up to its await number `at`, and lets that one fail."""

    def __init__(self, handler: Awaitable[web.StreamResponse], failure: Failure, at: int) -> None:
        self.happened = False
        self._handler, self._failure, self._at = handler, failure, at

    def __await__(self) -> Generator[Any, Any, web.StreamResponse]:
        inner, sent, number = self._handler.__await__(), None, 0
        try:
            awaited = next(inner)
            while True:
                number += 1
                hit = number == self._at
                self.happened |= hit
                if hit and self._failure == "before":
                    awaited = inner.throw(Planted())
                    continue
                if hit and self._failure == "cancelled":
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                try:
                    sent = yield awaited
                except BaseException as error:  # noqa: BLE001  (whatever comes goes on to the handler)
                    awaited = inner.throw(error)
                    continue
                awaited = inner.throw(Planted()) if hit and self._failure == "after" else inner.send(sent)
        except StopIteration as end:
            return cast(web.StreamResponse, end.value)


@pytest.mark.rest
@pytest.mark.parametrize(("name", "failure"), CASES)
async def test_attack_D10_a_failure_at_every_await_leaves_nothing_reserved(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, name: str, failure: Failure
) -> None:
    path, body = REQUESTS[name]
    tenant, key = await gateway.new_tenant("one at a time")
    async with gateway.app[DATABASE].write() as conn:
        await tenants.set_limits(conn, tenant, Limits(concurrency=2 if name == "prompts" else 1), now=1)
    plan = _Plan(failure)
    if name == "keyed":
        monkeypatch.setattr(idempotency, "_keyed", plan.over(idempotency._keyed))
    else:
        [route] = [one for one in gateway.app.router.routes() if one.method == "POST" and _path(one) == path]
        monkeypatch.setattr(route, "_handler", plan.over(route._handler))
    limiter, links = gateway.app[METERING].limiter, gateway.app[GENERATION].fleet.links
    statuses: set[int] = set()
    last = 0
    async with gateway.session(key) as session:
        for at in range(1, MOST_AWAITS):
            plan.at, plan.running = at, None
            headers = {"idempotency-key": f"{failure}-{at}"} if name == "keyed" else {}
            try:
                async with session.post(path, json=body, headers=headers) as answer:
                    last = answer.status
                    await answer.read()
            except aiohttp.ClientError:
                last = 0
            statuses.add(last)
            await gateway.app[DETACHED].join(10)  # a keyed request outlives its handler
            await until(lambda: not limiter.num_held and not limiter.num_owed and not links[0].num_calls)
            if plan.running is not None and not plan.running.happened:
                break
        else:
            raise AssertionError("the handler never ended")
        # The last one met no failure, with every place of the tenant free.
        assert last == 200
        assert at > 3
        async with session.get("/v1/me/limits") as reply:
            limits = (await reply.json())["data"]
        assert [one["used"] for one in limits if one["dimension"] == "concurrency"] == [0], limits
    await gateway.balanced()
    # 503: it could not be stored. 0: nobody was there any more.
    assert statuses <= {0, 200, 500, 503}, statuses


class _Plan:
    def __init__(self, failure: Failure) -> None:
        self.at = 0
        self.running: FailingAt | None = None
        self._failure = failure

    def over(self, inner: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def handler(*args: Any) -> Any:
            self.running = FailingAt(inner(*args), self._failure, self.at)
            return await self.running

        return handler


def _path(route: web.AbstractRoute) -> str:
    return route.resource.canonical if route.resource is not None else ""
