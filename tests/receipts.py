"""Clients that keep receipts: what each request was told in the end, to be held against the ledger (I10, I11).

Every way to ask for tokens is among them: streams, whole replies, several choices, Idempotency-Keys that are repeated
until they are answered.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

PATH = "/v1/completions"
RETRY_S = 0.2
ASK_LIMIT_S = 60.0
LAST_ANSWER_S = 120.0
End = Literal["finished", "error", "cut"]
"""error: the client was told so, by status or by event. cut: it heard nothing more."""


@dataclass
class Receipt:
    request_id: str = ""
    """Empty: not even headers came."""
    end: End = "cut"
    status: int = 0
    code: str = ""
    usage: dict[str, Any] | None = None
    num_pieces: int = 0
    """The number of pieces that brought text: no more than tokens."""


@dataclass
class Clients:
    """`run` asks until `stop`; `receipts` is what came of it."""

    base_url: str
    api_key: str
    model: str
    seed: int
    keyed_api_key: str = ""
    """The key of a tenant whose every request has an Idempotency-Key."""
    receipts: list[Receipt] = field(default_factory=list)
    keyed: dict[str, Receipt] = field(default_factory=dict)
    """The answers that came at last, by key."""
    num_answered: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _until: float = math.inf

    async def run(self, num_clients: int) -> None:
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(ASK_LIMIT_S)
        async with (
            aiohttp.ClientSession(self.base_url, connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(num_clients):
                work = self._keyed if self.keyed_api_key and number % 4 == 3 else self._plain
                group.create_task(work(session, number))

    def stop(self) -> None:
        """Stops. What was asked with a key is asked on until it is answered, so that it is known what it costs."""
        self.stopping.set()
        self._until = time.monotonic() + LAST_ANSWER_S

    async def _plain(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        while not self.stopping.is_set():
            receipt = await self._ask(session, self._body(rng), self.api_key)
            self.receipts.append(receipt)
            await self._note(receipt)

    async def _keyed(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        asked = 0
        while not self.stopping.is_set():
            key, body = f"{number}-{asked}", self._body(rng)
            asked += 1
            while (receipt := await self._ask(session, body, self.keyed_api_key, key)).end != ("finished"):
                await self._note(receipt)
                assert time.monotonic() < self._until, f"key {key} is not answered: {receipt}"
            self.keyed[key] = receipt
            await self._note(receipt)

    async def _note(self, receipt: Receipt) -> None:
        if receipt.end == "finished":
            self.num_answered += 1
        else:
            await asyncio.sleep(RETRY_S)

    def _body(self, rng: random.Random) -> dict[str, Any]:
        stream = rng.random() < 0.6
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": [rng.randrange(32, 127) for _ in range(rng.randint(1, 80))],
            "max_tokens": rng.randint(1, 48),
            "seed": rng.randrange(1000),
            "temperature": 0.8,
            "ignore_eos": True,
            "stream": stream,
            "n": rng.choice((1, 1, 1, 3)),
        }
        return body | ({"stream_options": {"include_usage": True}} if stream else {})

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any], api_key: str, key: str = "") -> Receipt:
        headers = {"authorization": f"Bearer {api_key}"} | ({"idempotency-key": key} if key else {})
        receipt = Receipt()
        try:
            async with session.post(PATH, json=body, headers=headers) as answer:
                receipt.request_id = answer.headers.get("x-request-id", "")
                receipt.status = answer.status
                if answer.status != 200:
                    _refused(receipt, await answer.json())
                elif body["stream"]:
                    await _read_stream(receipt, answer)
                else:
                    whole = await answer.json()
                    _of_body(receipt, whole)
                    receipt.usage, receipt.end = whole["usage"], "finished"
        except (aiohttp.ClientError, OSError, TimeoutError, json.JSONDecodeError):
            pass  # cut
        return receipt


def _refused(receipt: Receipt, body: dict[str, Any]) -> None:
    receipt.end, receipt.code = "error", str(body["error"]["code"])


async def _read_stream(receipt: Receipt, answer: aiohttp.ClientResponse) -> None:
    async for data in _events(answer):
        if data == "[DONE]":
            receipt.end = "finished"
            return
        event = json.loads(data)
        if "error" in event:
            _refused(receipt, event)
            return
        _of_body(receipt, event)
        receipt.usage = event.get("usage") or receipt.usage
        receipt.num_pieces += sum(bool(choice["text"]) for choice in event["choices"])


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


def _of_body(receipt: Receipt, body: dict[str, Any]) -> None:
    """A replay names the request that was run."""
    if ending := body.get("headgate"):
        receipt.request_id = ending["request_id"]
