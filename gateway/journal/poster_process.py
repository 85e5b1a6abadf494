"""A poster in a separate process, so that a posting's statements block nothing on the gateway's loop.

The two processes share one socket, with one call at a time. The poster's process ends when the socket does. If a call
is under way it ends at once, because the gateway has died or has given it up; for SQL this is an unknown COMMIT like
any other. A process that died is started again by the next call, which goes on from the last offset known to be in SQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop
from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from gateway.base.lifecycle import uninterrupted
from gateway.journal.poster import Posted, Poster
from workers.process import logs
from workers.process.children.parent import die_with
from workers.process.turns import step_back
from workers.protocol.counts import EngineAck, EngineRecords, ResidencyReport
from workers.protocol.frames import Frames

CLOSE_S = 5.0
NICENESS = 5
"""The poster's process yields the CPU to others. A posting can wait for a SETTLE that a client waits for; it takes a
quarter of a core that other processes want whole.
"""
MAX_REASON_CHARS = 1000


class _Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message. It carries the URL because a URL with a password must not be on a command line."""

    directory: str
    url: str
    slot: int
    offset: int
    log_level: int


class _Post(msgspec.Struct, frozen=True, tag=True):
    durable_seq: int


class _Noted(msgspec.Struct, frozen=True, tag=True):
    pass


class _Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


_Call = _Begin | _Post | EngineRecords | ResidencyReport
_Answer = Posted | _Noted | _Failed | EngineAck
A = TypeVar("A", Posted, _Noted, EngineAck)

_CALLS: Frames[_Call] = Frames(_Call)
_ANSWERS: Frames[_Answer] = Frames(_Answer)


class NotPosted(OSError):
    """SQL did not take it, or the process is gone: it is not known whether it was posted."""


class PosterProcess:
    """The gateway's half; its calls are those of `Posts`."""

    def __init__(self, directory: Path, url: str, slot: int, offset: int) -> None:
        self.offset = offset
        self._directory = directory
        self._url = url
        self._slot = slot
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def pid(self) -> int | None:
        """The process id. None means that the process does not run; the next call starts it."""
        return self._process.pid if self._process is not None and self._link is not None else None

    async def post(self, durable_seq: int) -> Posted:
        posted = await self._call(_Post(durable_seq), Posted)
        self.offset = posted.offset
        return posted

    async def post_engine_records(self, frame: EngineRecords) -> EngineAck:
        return await self._call(frame, EngineAck)

    async def note_residency(self, report: ResidencyReport) -> None:
        await self._call(report, _Noted)

    async def close(self) -> None:
        self._hang_up()
        await self._end()

    async def _call(self, call: _Call, kind: type[A]) -> A:
        async with self._turn:
            answer = await uninterrupted(self._exchange(call))
        if isinstance(answer, _Failed):
            raise NotPosted(answer.reason)
        assert isinstance(answer, kind)
        return answer

    async def _exchange(self, call: _Call) -> _Answer:
        try:
            if self._link is None:
                await self._start()
            assert self._link is not None
            reader, writer = self._link
            await _write(writer, _CALLS.encode(call))
            return await _ANSWERS.receive(reader)
        except (asyncio.IncompleteReadError, OSError) as reason:
            self._hang_up()
            raise NotPosted("the poster is gone") from reason
        except asyncio.CancelledError:
            self._hang_up()  # an answer may still come; it belongs to no call
            raise

    async def _start(self) -> None:
        await self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._link = await asyncio.open_connection(sock=ours)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gateway.journal.poster_process",
                str(os.getpid()),
                stdin=theirs.fileno(),
                start_new_session=True,  # a terminal's signals are for the gateway
            )
        level = logging.getLogger().getEffectiveLevel()
        begin = _Begin(str(self._directory), self._url, self._slot, self.offset, level)
        await _write(self._link[1], _CALLS.encode(begin))

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link[1].close()
        self._link = None

    async def _end(self) -> None:
        """Ends the process, so that two of them never post at a time."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def serve(link: socket.socket) -> None:
    """Runs the process's half; returns when the gateway closes the link."""
    reader, writer = await asyncio.open_connection(sock=link)
    begin = await _unless_hung_up(asyncio.create_task(_CALLS.receive(reader)))
    if begin is None:
        return
    assert isinstance(begin, _Begin)
    logs.configure(logging.getLevelName(begin.log_level))
    database = Database(begin.url, pool_size=1)
    poster = Poster(Path(begin.directory), database, begin.slot, begin.offset)
    arriving = asyncio.create_task(_CALLS.receive(reader))
    while call := await _unless_hung_up(arriving):
        arriving = asyncio.create_task(_CALLS.receive(reader))
        answering = asyncio.create_task(_answer(poster, call))
        await asyncio.wait([answering, arriving], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():  # only the end of the link can come before the answer
            os._exit(1)
        with contextlib.suppress(OSError):
            await _write(writer, _ANSWERS.encode(await answering))
    await database.close()


async def _answer(poster: Poster, call: _Call) -> _Answer:
    try:
        match call:
            case _Post(durable_seq):
                return await poster.post(durable_seq)
            case EngineRecords():
                return await poster.post_engine_records(call)
            case ResidencyReport():
                await poster.note_residency(call)
                return _Noted()
            case _Begin():
                raise RuntimeError("it has begun already")
    except (SQLAlchemyError, OSError) as failure:
        return _Failed(str(failure)[:MAX_REASON_CHARS])


async def _unless_hung_up(arriving: asyncio.Task[_Call]) -> _Call | None:
    try:
        return await arriving
    except (asyncio.IncompleteReadError, OSError):
        return None


async def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(frame)
    await writer.drain()


def main() -> None:
    die_with(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # these signals are meant for the gateway, which ends this process
        signal.signal(number, signal.SIG_IGN)
    step_back(NICENESS)
    uvloop.run(serve(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
