"""The link from one process to the limiter's Redis: pipelined script calls, data lives, circuit breaker. It knows no
key names.

Calls that come during a round trip go together with the next one, in order, on one connection. A round trip that fails
is repeated once, unchanged (every script may be repeated). The breaker judges Redis by its answers: after 5 failures in
a second only one probe per second is sent.

A data life has a name. A new name is drawn when the server's run id is new (restart, failover) or its keys are gone
(FLUSHALL). All gateways agree on it, since it is stored with SET NX under the run id.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, cast

import msgspec
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from workers.protocol.patience import patience

Argument = str | int | bytes
SCRIPTS = ("reserve", "extend", "settle", "release", "touch", "peek", "rebuild", "audit")

TIMEOUT_S = 1.0
"""The timeout tolerates a busy machine. Where Redis, workers and gateway share two cores and hundreds of requests come
at once, Redis may not run for some tenths of a second. A shorter timeout would then refuse all of them.
"""
MAX_BATCH = 128
BREAKER_FAILURES = 5
BREAKER_WINDOW_S = 1.0
"""The breaker opens after `BREAKER_FAILURES` failures in this time, plus the time that the failures themselves take."""
PROBE_EVERY_S = 1.0


class LimiterUnavailable(Exception):
    """Redis cannot be reached, or cannot be trusted yet. Nothing was granted."""


class NotSent(LimiterUnavailable):
    """The breaker refused the call: Redis did not get it."""


class BooksUnavailable(LimiterUnavailable):
    """The data that Redis lost cannot be rebuilt now, because SQL does not answer."""


class LifeChanged(LimiterUnavailable):
    """This Redis is in another data life than the one that the call was made for. The call was not sent;
    make it anew.
    """


class _OtherRun(redis.ConnectionError):
    pass


class _Call(msgspec.Struct, frozen=True):
    command: tuple[Argument, ...]
    run_id: str
    """The run id of the server that the call was made for. An empty value allows any server."""
    answer: asyncio.Future[Any]


class RedisLink:
    """A pipelined connection to Redis. `close()` must be awaited. Every call ends within 1.5 `timeout_s`, with an
    answer or with `LimiterUnavailable`.
    """

    def __init__(
        self,
        url: str,
        *,
        life_key: str,
        timeout_s: float = TIMEOUT_S,
        script_ran: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        """`script_ran` is called with the name of each script that was answered, and the seconds that it took."""
        self._life_key = life_key
        self._script_ran = script_ran
        self._timeouts_s = (timeout_s, timeout_s / 2)
        self._window_s = BREAKER_WINDOW_S + BREAKER_FAILURES * timeout_s
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=None,  # a timer for each reply; the round trip has one
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=2,
            redis_connect_func=self._on_connect,
        )
        common = _source("common")
        self._sources = {name: _packed(common + _source(name)) for name in SCRIPTS}
        self._sha = {
            name: sha1(source.encode(), usedforsecurity=False).hexdigest() for name, source in self._sources.items()
        }
        self._connection: Any = None
        self._pending: deque[_Call] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._run_id = ""
        self._life = ""
        self._failures: deque[float] = deque(maxlen=BREAKER_FAILURES)
        self._closed_until = 0.0

    @property
    def is_open(self) -> bool:
        """The value is False while the breaker refuses calls without sending them."""
        return self._closed_until == 0.0

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> list[Any]:
        """Runs one script of `gateway/limiter/lua` and returns its answer, made of integers, text and lists."""
        began = time.perf_counter()
        answer = await self.command("EVALSHA", self._sha[name], len(keys), *keys, *args)
        self._script_ran(name, time.perf_counter() - began)
        return cast(list[Any], msgspec.msgpack.decode(answer))

    async def command(self, *command: Argument) -> Any:
        """Runs any other command. If the caller is cancelled, the call is still sent."""
        self._check_breaker()
        call = _Call(command, self._run_id, asyncio.get_running_loop().create_future())
        self._pending.append(call)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._send_pending())
        return await call.answer

    @property
    def life(self) -> str:
        """The name of the data life as last seen. An empty value means that it is not known."""
        return self._life

    async def refresh_life(self) -> str:
        """Asks Redis for the name of this data life, and names it if no gateway has done so."""
        drawn = secrets.token_hex(8)
        if not self._run_id:
            await self.command("PING")  # connecting reads the run id
        run_id = self._run_id
        key = self._life_key + run_id
        _, stored = await asyncio.gather(self.command("SET", key, drawn, "NX"), self.command("GET", key))
        if stored is None:
            raise LimiterUnavailable("Redis keeps nothing")
        if run_id == self._run_id:
            self._life = stored.decode()
        return self._life

    async def close(self) -> None:
        if self._pump is not None:
            await self._pump
        await self._client.aclose()

    def _check_breaker(self) -> None:
        """While the breaker is half open, one call per second goes through."""
        if self.is_open:
            return
        now = asyncio.get_running_loop().time()
        if now < self._closed_until:
            raise NotSent("limiter is down")
        self._closed_until = now + PROBE_EVERY_S

    async def _send_pending(self) -> None:
        while self._pending:
            batch = [self._pending.popleft() for _ in range(min(MAX_BATCH, len(self._pending)))]
            batch = [call for call in batch if self._is_for_this_run(call)]
            if not batch:
                continue
            answers = await self._round_trip([call.command for call in batch])
            for call, answer in zip(batch, answers, strict=True):
                if call.answer.done():  # its caller was cancelled
                    continue
                if isinstance(answer, Exception):
                    call.answer.set_exception(answer)
                else:
                    call.answer.set_result(answer)

    def _is_for_this_run(self, call: _Call) -> bool:
        """A call that was made for another server than the one now connected must not reach it."""
        if call.run_id in ("", self._run_id):
            return True
        if not call.answer.done():
            call.answer.set_exception(LifeChanged("Redis was restarted or replaced"))
        return False

    async def _round_trip(self, commands: list[tuple[Argument, ...]]) -> list[Any]:
        for timeout_s in self._timeouts_s:
            try:
                async with patience(timeout_s):
                    answers = await self._execute(commands)
            except _OtherRun:
                return [LifeChanged("Redis was restarted or replaced") for _ in commands]
            except (RedisError, OSError, TimeoutError):
                self._note_failure()
                continue
            self._failures.clear()
            self._closed_until = 0.0
            return answers
        return [LimiterUnavailable("limiter does not answer") for _ in commands]

    async def _execute(self, commands: list[tuple[Argument, ...]]) -> list[Any]:
        answers = await self._pipeline(commands)
        missing = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if missing:
            await self._pipeline([("SCRIPT", "LOAD", source) for source in self._sources.values()])
            repeated = await self._pipeline([commands[i] for i in missing])
            for i, answer in zip(missing, repeated, strict=True):
                answers[i] = answer
        # Redis may answer OOM, READONLY, LOADING or a script's own fault. Each refusal counts as an absent Redis.
        return [LimiterUnavailable(str(answer)) if isinstance(answer, Exception) else answer for answer in answers]

    async def _pipeline(self, commands: list[tuple[Argument, ...]]) -> list[Any]:
        """Uses the connection itself, because the client's own pipeline costs more than the round trip. The connection is
        kept: to take it from the pool and give it back costs as much again. If the server has closed it meanwhile, the
        first try fails and the second one connects anew.
        """
        if self._connection is None:
            pool: Any = self._client.connection_pool
            self._connection = await pool.get_connection()
        connection = self._connection
        if not connection.is_connected:
            await connection.connect()
        try:
            await connection.send_packed_command(b"".join(map(_command, commands)))
            return [await _reply(connection) for _ in commands]
        except BaseException:  # the remaining answers belong to nobody
            await connection.disconnect(nowait=True)
            raise

    async def _on_connect(self, connection: Any) -> None:
        """A new connection may lead to another data life of Redis. Nothing that was built before may be sent on it."""
        await connection.on_connect()
        await connection.send_command("INFO", "server")
        info = await connection.read_response()
        run_id = next(
            line.removeprefix("run_id:").strip() for line in info.decode().splitlines() if line.startswith("run_id:")
        )
        known, self._run_id = self._run_id, run_id
        if known and known != run_id:
            self._life = ""
            raise _OtherRun

    def _note_failure(self) -> None:
        now = asyncio.get_running_loop().time()
        self._failures.append(now)
        full = len(self._failures) == BREAKER_FAILURES
        if full and now - self._failures[0] <= self._window_s:
            self._closed_until = now + PROBE_EVERY_S


def _command(arguments: tuple[Argument, ...]) -> bytes:
    """Packs a command as an array of strings, the form that RESP wants."""
    texts = [str(argument).encode() if type(argument) is not bytes else argument for argument in arguments]
    return b"*%d\r\n%b" % (len(texts), b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in texts]))


async def _reply(connection: Any) -> Any:
    """Reads one reply. A refusal by Redis is returned as a value."""
    try:
        return await connection.read_response()
    except ResponseError as refusal:
        return refusal


def _source(name: str) -> str:
    return files("gateway.limiter").joinpath("lua", f"{name}.lua").read_text("utf-8") + "\n"


def _packed(source: str) -> str:
    """Returns the script, wrapped so that it answers with one MessagePack value."""
    return f"local function answer()\n{source}end\nreturn cmsgpack.pack(answer())\n"
