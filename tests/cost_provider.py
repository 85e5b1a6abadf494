"""A provider's cost API for tests, in OpenAI's words and in Anthropic's: days with lines, in pages, and faults on order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from accounting.values.periods import DAY_S

ADMIN_KEY = "sk-admin-secret-0123456789"


@dataclass(frozen=True)
class Line:
    """A line of a day, with its amount in the currency. OpenAI is sent the literal, Anthropic a hundred times as much."""

    day: int
    item: str
    amount: str
    currency: str = "USD"
    project: str = ""


@dataclass
class CostProvider:
    url: str = ""
    lines: list[Line] = field(default_factory=list)
    page_days: int = 7
    answers: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(default_factory=list)
    """Each takes the place of one answer."""
    asked: list[web.Request] = field(default_factory=list)
    num_at_once = 0
    most_at_once = 0
    pause_s: float = 0.0

    async def openai(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "authorization", f"Bearer {ADMIN_KEY}", self._openai)

    async def anthropic(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "x-api-key", ADMIN_KEY, self._anthropic)

    async def _answer(
        self, request: web.Request, header: str, value: str, page: Callable[[web.Request], bytes]
    ) -> web.StreamResponse:
        self.asked.append(request)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(self.pause_s)
            if self.answers:
                return await self.answers.pop(0)(request)
            if request.headers.get(header) != value:
                return web.json_response({"error": {"message": f"no such key at {request.url}"}}, status=401)
            return web.Response(body=page(request), content_type="application/json")
        finally:
            self.num_at_once -= 1

    def _openai(self, request: web.Request) -> bytes:
        query = request.query
        assert (query["bucket_width"], query["group_by"]) == ("1d", "line_item")
        wanted = query.getall("project_ids", [])
        lines = [line for line in self.lines if not wanted or line.project in wanted]
        return self._page(request, int(query["start_time"]), int(query["end_time"]), lines, _openai_bucket)

    def _anthropic(self, request: web.Request) -> bytes:
        query = request.query
        assert request.headers["anthropic-version"] == "2023-06-01"
        assert query.getall("group_by[]") == ["workspace_id", "description"]
        since, until = (int(datetime.fromisoformat(query[n]).timestamp()) for n in ("starting_at", "ending_at"))
        return self._page(request, since, until, self.lines, _anthropic_bucket)

    def _page(
        self, request: web.Request, since: int, until: int, lines: list[Line], bucket: Callable[[int, list[Line]], str]
    ) -> bytes:
        start = int(request.query.get("page", f"p{since}").removeprefix("p"))
        end = min(until, start + self.page_days * DAY_S)
        days = range(start, end, DAY_S)
        buckets = [bucket(day, [line for line in lines if line.day == day]) for day in days]
        has_more = end < until
        following = json.dumps(f"p{end}" if has_more else None)
        data = ", ".join(buckets)
        return f'{{"data": [{data}], "has_more": {json.dumps(has_more)}, "next_page": {following}}}'.encode()


def _openai_bucket(day: int, lines: list[Line]) -> str:
    results = ", ".join(
        f'{{"amount": {{"value": {one.amount}, "currency": "{one.currency.lower()}"}},'
        f' "line_item": {json.dumps(one.item or None)}, "project_id": {json.dumps(one.project or None)}}}'
        for one in lines
    )
    return f'{{"object": "bucket", "start_time": {day}, "end_time": {day + DAY_S}, "results": [{results}]}}'


def _anthropic_bucket(day: int, lines: list[Line]) -> str:
    results = [
        {
            "amount": _cents(one.amount),
            "currency": one.currency,
            "description": one.item or None,
            "workspace_id": one.project or None,
        }
        for one in lines
    ]
    starts, ends = (datetime.fromtimestamp(second, UTC).isoformat() for second in (day, day + DAY_S))
    return json.dumps({"starting_at": starts, "ending_at": ends, "results": results})


def _cents(amount: str) -> str:
    """A hundred times the amount, by moving its point."""
    sign, digits = ("-", amount[1:]) if amount.startswith("-") else ("", amount)
    whole, _, places = digits.partition(".")
    places = places.ljust(2, "0")
    return f"{sign}{whole}{places[:2]}.{places[2:] or '0'}"


def answering(status: int = 200, body: bytes | str = b"{}", **options: Any) -> Callable[[web.Request], Any]:
    async def answer(_: web.Request) -> web.StreamResponse:
        data = body.encode() if isinstance(body, str) else body
        kind = options.pop("content_type", "application/json")
        return web.Response(status=status, body=data, content_type=kind, **options)

    return answer


@contextlib.asynccontextmanager
async def running_cost_provider(**fields: Any) -> AsyncIterator[CostProvider]:
    provider = CostProvider(**fields)
    app = web.Application()
    app.router.add_get("/v1/organization/costs", provider.openai)
    app.router.add_get("/v1/organizations/cost_report", provider.anthropic)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    provider.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    await web.SockSite(runner, sock).start()
    try:
        yield provider
    finally:
        await runner.cleanup()
