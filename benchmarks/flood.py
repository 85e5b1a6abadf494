"""A tenant who sends far more than it may: an open loop in a process of its own, as cheap as a sender in Python can be.

    python benchmarks/flood.py --base-url http://127.0.0.1:8080/v1 --key hg_live_... --model headgate-demo --rate 400

Requests leave when they are due, whatever the server does, over connections that are kept; no two prompts begin alike.
A line of JSON says what came of them. Knows HTTP only as far as to see where an answer ends.

The sender stands for another tenant's machine, so it has the lowest priority here: what a victim waits for is the server,
not the sender. How much it sent nevertheless is part of the line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from urllib.parse import urlsplit

WORD = 300
"""Above it lie ordinary tokens of most vocabularies."""


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, flood: Flood) -> None:
        self._flood = flood
        self._transport: asyncio.Transport | None = None
        self._sent_at = 0.0
        self._head = b""
        self._num_left = -1
        """Bytes of a body whose length was told; -1: it is chunked, or its head is not here yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._sent_at, self._head, self._num_left = time.perf_counter(), b"", -1
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._head:
            self._head = data
            head, _, body = data.partition(b"\r\n\r\n")
            _, told, length = head.lower().partition(b"content-length: ")
            self._num_left = int(length.partition(b"\r")[0]) - len(body) if told else -1
        elif self._num_left >= 0:
            self._num_left -= len(data)
        chunked_end = self._num_left < 0 and data.endswith(b"0\r\n\r\n")
        if self._num_left == 0 or chunked_end:
            self._flood.answered(int(self._head[9:12]), time.perf_counter() - self._sent_at)
            self._flood.idle.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._flood.idle:
            self._flood.idle.remove(self)
        elif not self._flood.is_over:
            self._flood.answered(0, time.perf_counter() - self._sent_at)


class Flood:
    def __init__(self, told: argparse.Namespace) -> None:
        self.idle: list[Connection] = []
        self.is_over = False
        self._address = urlsplit(told.base_url)
        self._head = (
            f"POST {self._address.path}/completions HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
            f"authorization: Bearer {told.key}\r\ncontent-type: application/json\r\ncontent-length: "
        )
        rest = ",".join(["777"] * (told.input_tokens - 3))
        self._tail = (
            f',{rest}],"model":"{told.model}","max_tokens":{told.output_tokens},"temperature":0,'
            '"stream":true,"ignore_eos":true}'
        )
        self._told = told
        self._random = random.Random(told.seed)
        self._seconds: dict[int, list[float]] = {}
        self._num_sent = 0
        self._most_late = 0.0

    def answered(self, status: int, seconds: float) -> None:
        self._seconds.setdefault(status, []).append(seconds)

    async def run(self) -> None:
        due = time.perf_counter()
        end = due + self._told.seconds
        opening: set[asyncio.Task[None]] = set()
        while due < end and not self.is_over:
            due += self._random.expovariate(self._told.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._most_late = max(self._most_late, time.perf_counter() - due)
            self._num_sent += 1
            if self.idle:
                self.idle.pop().send(self._request())
            else:
                task = asyncio.create_task(self._open())
                opening.add(task)
                task.add_done_callback(opening.discard)
        self.is_over = True

    async def _open(self) -> None:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self), self._address.hostname, self._address.port
            )
        except OSError:
            self.answered(0, 0.0)
            return
        connection.send(self._request())

    def _request(self) -> bytes:
        words = ",".join(str(WORD + self._random.randrange(3000)) for _ in range(3))
        body = f'{{"prompt":[{words}{self._tail}'
        return f"{self._head}{len(body)}\r\n\r\n{body}".encode()

    def report(self) -> dict[str, object]:
        """Answers by status (0: none), and the median milliseconds until their end."""
        median = {s: 1e3 * sorted(t)[len(t) // 2] for s, t in self._seconds.items()}
        return {
            "num_sent": self._num_sent,
            "answers": dict(Counter({s: len(t) for s, t in self._seconds.items()})),
            "median_ms": {s: round(ms, 1) for s, ms in median.items()},
            "latest_sent_s": round(self._most_late, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", default="headgate-demo")
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    # It runs where nobody else wants the core, and leaves it at once; the lowest ordinary priority finishes its turn first.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    flood = Flood(told)

    async def until_told() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: setattr(flood, "is_over", True))
        await flood.run()

    asyncio.run(until_told())
    print(json.dumps(flood.report()))


if __name__ == "__main__":
    main()
