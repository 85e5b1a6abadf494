"""A gateway's end of one link, for tests: dials, says hello and alive, keeps all it hears."""

from __future__ import annotations

import asyncio

from load import stretched

from workers.protocol.connection import dial
from workers.protocol.frames import FrameError
from workers.protocol.messages import Alive, Hello, StepFrame


async def until(condition, limit_s=15):
    """Looks again and again: for state that tells nobody when it changes."""
    async with asyncio.timeout(stretched(limit_s)):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


class GatewayLink:
    def __init__(self, connection):
        self.connection = connection
        self.heard = []
        self.closed = asyncio.Event()
        self.error = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._listen())
        self._beat = None

    @classmethod
    async def dial(cls, address, *, hello=True, alive=True):
        link = cls(await dial(address))
        if hello:
            link.send(Hello(1, "gateway"))
        if alive:
            link._beat = asyncio.create_task(link._say_alive())
        return link

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()

    def send(self, *messages):
        for message in messages:
            self.connection.send(message)

    def send_raw(self, data):
        self.connection._writer.write(data)

    async def until(self, condition, limit_s=30):
        """Returns what `condition(heard)` gives once it is neither None nor False."""
        async with asyncio.timeout(stretched(limit_s)):
            while (found := condition(self.heard)) is None or found is False:
                assert not self.closed.is_set(), "the link closed while waiting"
                self._changed.clear()
                await self._changed.wait()
        return found

    async def of(self, kind, limit_s=30, **fields):
        """The first message of a kind with these fields."""

        def first(heard):
            for message in heard:
                if isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items()):
                    return message
            return None

        return await self.until(first, limit_s)

    def tokens(self, request_id, index=0):
        """Returns what arrived of a choice; a gap, a double or a foreign order fails."""
        frames = [m for m in self.heard if isinstance(m, StepFrame)]
        deltas = [d for f in frames for d in f.deltas]
        tokens = []
        for delta in deltas:
            if (delta.request_id, delta.index) == (request_id, index):
                assert delta.seq_no == len(tokens)
                tokens += delta.tokens
        return tokens

    def requests_heard_of(self):
        frames = [m for m in self.heard if isinstance(m, StepFrame)]
        return {d.request_id for f in frames for d in f.deltas}

    async def close(self):
        self.connection.close()
        for task in (self._task, self._beat):
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, (self._task, self._beat)), return_exceptions=True)

    async def _listen(self):
        try:
            async for messages in self.connection:
                self.heard += messages
                self._changed.set()
        except FrameError as error:
            self.error = error
        finally:
            self.closed.set()
            self._changed.set()

    async def _say_alive(self):
        while True:
            self.send(Alive())
            await asyncio.sleep(0.5)
