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
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import cache, partial
from hashlib import sha1
from importlib.resources import files
from typing import Any, cast

import hiredis
import msgspec
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, NoScriptError, RedisError, ResponseError

from workers.protocol.patience import TICKS, Silence, patience

Argument = str | int | bytes
Script = Callable[[], Coroutine[Any, Any, list[Any]]]
SCRIPTS = ("reserve", "extend", "settle", "release", "touch", "peek", "rebuild", "audit")

TIMEOUT_S = 1.0
"""The timeout tolerates a busy machine. Where Redis, workers and gateway share two cores and hundreds of requests come
at once, Redis may not run for some tenths of a second. A shorter timeout would then refuse all of them.
"""
MAX_BATCH = 128
_UNUSABLE = ("LOADING", "NOAUTH", "READONLY", "MASTERDOWN")
"""Refusals after which the connection is of no use now: after the last two it leads to a server that is a replica now, and
a new one leads to the primary.
"""
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


_MORE = object()
"""The reader's word for a reply that is not whole."""


def reply_reader() -> hiredis.Reader:
    """Returns a reader of replies, which come in pieces of any length. A refusal is a reply. One that says that Redis cannot
    be used at all is a redis.ConnectionError, and what is no reply raises InvalidResponse.
    """
    return hiredis.Reader(protocolError=InvalidResponse, replyError=_refusal, notEnoughData=_MORE)


def _refusal(told: str) -> RedisError:
    if told.startswith(_UNUSABLE):
        return redis.ConnectionError(told)
    return NoScriptError(told) if told.startswith("NOSCRIPT") else ResponseError(told)


class _Wire(asyncio.Protocol):
    """An open connection. One group of commands is under way at a time, and its replies are read where they come: to wake a
    task for each piece takes longer.
    """

    def __init__(self, transport: Any, timeout_s: float) -> None:
        """Takes the connection over from whoever has opened it."""
        self._transport = transport
        self._opener = transport.get_protocol()
        self._silence_s = timeout_s * TICKS / (TICKS + 1)  # it ends up to a tick later
        self._silence: Silence | None = None
        self._reader = reply_reader()
        self._replies: list[Any] = []
        self._num_asked = 0
        self._answered: Callable[[list[Any] | Exception], None] | None = None
        transport.set_protocol(self)

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def ask(self, commands: Sequence[tuple[Argument, ...]], answered: Callable[[list[Any] | Exception], None]) -> None:
        """Sends commands. `answered` is called with all of their replies, or, once the connection is closed, with the reason
        why they did not come in time.
        """
        self._replies, self._num_asked, self._answered = [], len(commands), answered
        if self._silence is None:
            self._silence = Silence(self._silence_s, self._on_silence)
        else:
            self._silence.heard()
        self._transport.write(b"".join(map(_command, commands)))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _MORE:
                if isinstance(reply, redis.ConnectionError):
                    raise reply
                self._replies.append(reply)
        except RedisError as reason:
            self.close(reason)
            return
        num_left = self._num_asked - len(self._replies)
        if self._answered is None or num_left < 0:
            self.close(redis.ConnectionError("Redis sent what nobody had asked for"))
        elif num_left == 0:
            self._answer(self._replies)

    def connection_lost(self, reason: Exception | None) -> None:
        self._opener.connection_lost(reason)
        self.close(redis.ConnectionError("Redis closed the connection"))

    def close(self, reason: Exception) -> None:
        """Closes the connection: what may still come belongs to nobody."""
        if self._silence is not None:
            self._silence.stop()
        self._transport.abort()
        self._answer(reason)

    def _on_silence(self) -> None:
        self._silence = None  # the next command begins another one
        if self._answered is not None:
            self.close(TimeoutError("Redis does not answer"))

    def _answer(self, answers: list[Any] | Exception) -> None:
        answered, self._answered = self._answered, None
        if answered is not None:
            answered(answers)


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
        pool: Any = redis.ConnectionPool.from_url(
            url,
            protocol=2,
            socket_timeout=None,  # the round trip has a timer
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=self._on_connect,
        )
        self._connection = pool.make_connection()
        """The client's own connection, which knows URLs, passwords and TLS. It opens the wire."""
        common = _source("common")
        self._sources = {name: _packed(common + _source(name)) for name in SCRIPTS}
        self._sha = {
            name: sha1(source.encode(), usedforsecurity=False).hexdigest() for name, source in self._sources.items()
        }
        self._wire: _Wire | None = None
        """The connection, once it was open."""
        self._pending: deque[_Call] = deque()
        self._sent: list[_Call] = []
        """The calls of the round trip under way."""
        self._is_sending = False
        self._long_way: asyncio.Task[None] | None = None
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
        return await self.begin_script(name, keys, args)()

    def begin_script(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Script:
        """Sends a script as `send` sends a command. What is returned gives its answer when it is called."""
        began = time.perf_counter()
        sent = self.send("EVALSHA", self._sha[name], len(keys), *keys, *args)

        async def answer() -> list[Any]:
            packed = await sent
            self._script_ran(name, time.perf_counter() - began)
            return cast(list[Any], msgspec.msgpack.decode(packed))

        return answer

    async def command(self, *command: Argument) -> Any:
        """Runs any other command. If the caller is cancelled, the call is still sent."""
        return await self.send(*command)

    def send(self, *command: Argument) -> asyncio.Future[Any]:
        """Sends a command with those of this turn of the loop, whether its answer is awaited or not. Raises NotSent."""
        self._check_breaker()
        loop = asyncio.get_running_loop()
        call = _Call(command, self._run_id, loop.create_future())
        self._pending.append(call)
        if not self._is_sending:
            self._is_sending = True
            loop.call_soon(self._send_pending, context=Context())  # what it begins is of no one request
        return call.answer

    @property
    def life(self) -> str:
        """The name of the data life as last seen. An empty value means that it is not known."""
        return self._life

    @property
    def life_key(self) -> str:
        """The key under which Redis has the name of its data life."""
        return self._life_key + self._run_id

    async def refresh_life(self) -> str:
        """Asks Redis for the name of this data life, and names it if no gateway has done so."""
        drawn = secrets.token_hex(8)
        if not self._run_id:
            await self.command("PING")  # connecting reads the run id
        run_id, key = self._run_id, self.life_key
        _, stored = await asyncio.gather(self.command("SET", key, drawn, "NX"), self.command("GET", key))
        if stored is None:
            raise LimiterUnavailable("Redis keeps nothing")
        if run_id == self._run_id:
            self._life = stored.decode()
        return self._life

    async def close(self) -> None:
        while self._is_sending:
            await asyncio.wait([call.answer for call in (*self._sent, *self._pending)])
        await self._connection.disconnect(nowait=True)

    def _check_breaker(self) -> None:
        """While the breaker is half open, one call per second goes through."""
        if self.is_open:
            return
        now = asyncio.get_running_loop().time()
        if now < self._closed_until:
            raise NotSent("limiter is down")
        self._closed_until = now + PROBE_EVERY_S

    def _send_pending(self) -> None:
        """Sends what has come, on the open connection if there is one: a task for it would take as long as all the rest."""
        while self._pending:
            batch = [self._pending.popleft() for _ in range(min(MAX_BATCH, len(self._pending)))]
            self._sent = [call for call in batch if self._is_for_this_run(call)]
            if self._sent:
                break
        else:
            self._is_sending = False
            return
        if self._wire is not None and self._wire.is_open:
            self._wire.ask([call.command for call in self._sent], self._on_answers)
        else:
            self._go_long_way(self._timeouts_s)

    def _on_answers(self, answers: list[Any] | Exception) -> None:
        if isinstance(answers, Exception):
            self._note_failure()
            self._go_long_way(self._timeouts_s[1:])
        elif any(isinstance(answer, NoScriptError) for answer in answers):
            self._go_long_way(self._timeouts_s, answers)
        else:
            self._note_success()
            self._tell(answers)

    def _go_long_way(self, timeouts_s: Sequence[float], answers: Sequence[Any] = ()) -> None:
        """Makes the round trip, or what is left of it after these answers, in a task that connects and loads the scripts if it
        must.
        """
        self._long_way = asyncio.create_task(self._round_trip(timeouts_s, answers))

    def _tell(self, answers: Sequence[Any]) -> None:
        sent, self._sent = self._sent, []
        for call, answer in zip(sent, answers, strict=True):
            if call.answer.done():  # its caller was cancelled
                continue
            # Redis may answer OOM or a script's own fault. Each refusal counts as an absent Redis.
            if isinstance(answer, LimiterUnavailable):
                call.answer.set_exception(answer)
            elif isinstance(answer, Exception):
                call.answer.set_exception(LimiterUnavailable(str(answer)))
            else:
                call.answer.set_result(answer)
        self._send_pending()

    def _is_for_this_run(self, call: _Call) -> bool:
        """A call that was made for another server than the one now connected must not reach it."""
        if call.run_id in ("", self._run_id):
            return True
        if not call.answer.done():
            call.answer.set_exception(LifeChanged("Redis was restarted or replaced"))
        return False

    async def _round_trip(self, timeouts_s: Sequence[float], before: Sequence[Any]) -> None:
        answers: list[Any] = [LimiterUnavailable("limiter does not answer") for _ in self._sent]
        try:
            answers = await self._tries([call.command for call in self._sent], timeouts_s, before) or answers
        except _OtherRun:
            answers = [LifeChanged("Redis was restarted or replaced") for _ in self._sent]
        finally:
            self._tell(answers)

    async def _tries(
        self, commands: Sequence[tuple[Argument, ...]], timeouts_s: Sequence[float], before: Sequence[Any]
    ) -> list[Any]:
        """Returns no answers if each try failed."""
        for timeout_s in timeouts_s:
            try:
                async with patience(timeout_s):
                    answers = await self._with_scripts(commands, before or await self._pipeline(commands))
            except _OtherRun:
                raise
            except (RedisError, OSError, TimeoutError):
                self._note_failure()
                before = ()
            else:
                self._note_success()
                return answers
        return []

    async def _with_scripts(self, commands: Sequence[tuple[Argument, ...]], answers: Sequence[Any]) -> list[Any]:
        """Returns the answers, after scripts were loaded and called again that Redis did not know."""
        missing = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        found = list(answers)
        if missing:
            await self._pipeline([("SCRIPT", "LOAD", source) for source in self._sources.values()])
            repeated = await self._pipeline([commands[i] for i in missing])
            for i, answer in zip(missing, repeated, strict=True):
                found[i] = answer
        return found

    async def _pipeline(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        if self._wire is None or not self._wire.is_open:
            await self._connection.disconnect(nowait=True)
            await self._connection.connect()
            self._wire = _Wire(self._connection._writer.transport, self._timeouts_s[0])
        answered: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._wire.ask(commands, partial(_resolve, answered))
        try:
            return await answered
        except asyncio.CancelledError:
            self._wire.close(TimeoutError())
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

    def _note_success(self) -> None:
        self._failures.clear()
        self._closed_until = 0.0

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


def _resolve(answered: asyncio.Future[list[Any]], answers: list[Any] | Exception) -> None:
    if answered.done():
        return
    if isinstance(answers, Exception):
        answered.set_exception(answers)
    else:
        answered.set_result(answers)


@cache
def _source(name: str) -> str:
    return files("gateway.limiter").joinpath("lua", f"{name}.lua").read_text("utf-8") + "\n"


def _packed(source: str) -> str:
    """Returns the script, wrapped so that it answers with one MessagePack value."""
    return f"local function answer()\n{source}end\nreturn cmsgpack.pack(answer())\n"
