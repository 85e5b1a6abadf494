"""Eight attackers at once, in a process of their own, so that what they cost is not the clock of who is measured.

Run as a module: base URL, API key, model, seconds, a seed, a kind, and perhaps a model that gives vectors. Prints how many
answers there were of each status, as JSON. The process has the lowest priority: its work is done by other machines in
earnest.

The kinds: `refused`, bodies of any size that end in a 4xx; `any`, bodies of all kinds, of whose answers some are left in the
middle, and the responses that they made are read, streamed, gone on from, cancelled and deleted; `apart`, the bodies of
`refused`, sent to a server of this process. That is what the attackers cost the machine and not the gateway.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
import time
from collections import Counter, deque
from random import Random

import aiohttp
from aiohttp import web
from hostile import BATCHES, RESPONSES, STREAMED, body

from workers.process import turns

NUM_ATTACKERS = 8
LARGE_BYTES = 2**20
"""aiohttp warns of a larger body that is sent as one text of bytes."""
RESPONSE_ID = re.compile(rb"resp_[0-9a-f]{20,}")
SIZES = [100, 1000, 10_000, 100_000, 1_000_000, 4_000_000, 15_000_000]


class Attacker:
    def __init__(self, session: aiohttp.ClientSession, rng: Random, kind: str, model: str, vectors: str) -> None:
        self.found: Counter[str] = Counter()
        self._session, self._rng, self._kind = session, rng, kind
        self._model, self._vectors = model, vectors
        self._made: deque[str] = deque(maxlen=20)
        """Ids of responses."""

    async def attack(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self._ask()
            except (aiohttp.ClientError, TimeoutError) as error:
                self.found[type(error).__name__] += 1

    async def _ask(self) -> None:
        if self._made and self._rng.random() < 0.3:
            method, path, data, headers = self._follow(self._rng.choice(self._made))
        else:
            # In a thread: what takes seconds to write does not stop the bodies that are under way.
            method, (path, data, headers) = "POST", await asyncio.to_thread(self._body)
        sent = io.BytesIO(data) if len(data) > LARGE_BYTES else data
        async with self._session.request(method, path, data=sent, headers=headers) as reply:
            self.found[str(reply.status)] += 1
            if self._kind == "any" and self._rng.random() < 0.1:
                await reply.content.readany()
                return  # it has read enough
            text = await reply.read()
        if path == RESPONSES and reply.status == 200 and (found := RESPONSE_ID.search(text)):
            self._made.append(found[0].decode())

    def _body(self) -> tuple[str, bytes, dict[str, str]]:
        path, data, headers = body(self._rng, self._model, self._rng.choice(SIZES), self._vectors)
        if self._kind != "any":
            twice = b',"requests":7}' if path == BATCHES else b',"model":7}'
            odd = b',"temperature":9}' if path in STREAMED else twice
            data = data.rstrip(b"}") + self._rng.choice([b"", odd, b"]"])
        return path, data, headers

    def _follow(self, response_id: str) -> tuple[str, str, bytes, dict[str, str]]:
        """A request by the id of a response."""
        one, json_type = f"{RESPONSES}/{response_id}", {"content-type": "application/json"}
        further = {"model": self._model, "input": "on", "max_output_tokens": 2, "previous_response_id": response_id}
        return self._rng.choice(
            [
                ("GET", one, b"", {}),
                ("GET", f"{one}?stream=true&starting_after={self._rng.choice([-1, 0, 3, 10**9])}", b"", {}),
                ("GET", f"{one}/input_items?limit={self._rng.choice([1, 100, 0])}", b"", {}),
                ("POST", f"{one}/cancel", b"{}", json_type),
                ("POST", f"{one}/run", b"{}", json_type),
                ("DELETE", one, b"", {}),
                ("POST", RESPONSES, json.dumps(further).encode(), json_type),
                ("POST", RESPONSES, json.dumps(further | {"background": True}).encode(), json_type),
            ]
        )


async def _refuse(request: web.BaseRequest) -> web.Response:
    async for _ in request.content.iter_any():
        pass
    return web.Response(status=400)


async def _own_server() -> str:
    runner = web.ServerRunner(web.Server(_refuse))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def main(url: str, key: str, model: str, seconds: str, seed: str, kind: str, vectors: str = "") -> None:
    until = time.monotonic() + float(seconds)
    if kind == "apart":
        url = await _own_server()
    async with aiohttp.ClientSession(
        url, headers={"authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        attackers = [Attacker(session, Random(f"{seed}/{i}"), kind, model, vectors) for i in range(NUM_ATTACKERS)]
        await asyncio.gather(*(one.attack(until) for one in attackers))
    print(json.dumps(sum((one.found for one in attackers), Counter())))


if __name__ == "__main__":
    # It runs where nobody else wants the core, and leaves it at once; the lowest ordinary priority finishes its turn first.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.setsid()  # its policy counts inside of its session alone; of sessions, the niceness counts
    turns.step_back(19)
    asyncio.run(main(*sys.argv[1:]))
