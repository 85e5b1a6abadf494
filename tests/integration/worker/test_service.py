import asyncio

import pytest
from fakes import MODEL, ROOT, ScriptedWorker, expected_output, generate_request

from workers.protocol.connection import dial
from workers.protocol.messages import Finished, Hello, StepFrame, WorkerStatus


class Gateway:
    """A gateway's end of one link: dials, says hello, keeps all it hears."""

    def __init__(self, connection):
        self.connection = connection
        self.heard = []
        self.closed = asyncio.Event()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._listen())

    @classmethod
    async def dial(cls, address, hello=True):
        gateway = cls(await dial(address))
        if hello:
            gateway.connection.send(Hello(1, "gateway"))
        return gateway

    async def _listen(self):
        try:
            async for messages in self.connection:
                self.heard += messages
                self._changed.set()
        finally:
            self.closed.set()
            self._changed.set()

    async def until(self, condition, limit_s=10):
        async with asyncio.timeout(limit_s):
            while (found := condition(self.heard)) is None or found is False:
                self._changed.clear()
                await self._changed.wait()
        return found

    async def of(self, kind, count=1, **fields):
        def found(heard):
            kept = [m for m in heard if isinstance(m, kind)]
            kept = [m for m in kept if all(getattr(m, k) == v for k, v in fields.items())]
            return kept[:count] if len(kept) >= count else None

        return (await self.until(found))[0 if count == 1 else slice(None)]

    def tokens(self, request_id, index=0):
        frames = [m for m in self.heard if isinstance(m, StepFrame)]
        deltas = [
            d for f in frames for d in f.deltas if (d.request_id, d.index) == (request_id, index)
        ]
        for before, delta in zip([None, *deltas], deltas, strict=False):
            expected = 0 if before is None else before.seq_no + len(before.tokens)
            assert delta.seq_no == expected
        return [t for d in deltas for t in d.tokens]

    async def close(self):
        self.connection.close()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def worker(tmp_path):
    async with ScriptedWorker(tmp_path / "w.sock") as worker:
        yield worker


async def test_a_request_is_served_from_hello_to_finished(worker):
    gateway = await Gateway.dial(worker.address)
    hello = await gateway.of(Hello)
    assert (hello.model, hello.root, hello.block_size) == (MODEL, ROOT, 16)
    await gateway.of(WorkerStatus)
    request = generate_request("req_1", max_tokens=20)
    gateway.connection.send(request)
    finished = await gateway.of(Finished)
    assert gateway.tokens("req_1") == expected_output(request.prompt, request.sampling, 20)
    assert finished.usage.prompt == len(request.prompt)
    assert finished.usage.output == 20
    assert finished.reason == "length"
    await gateway.close()
