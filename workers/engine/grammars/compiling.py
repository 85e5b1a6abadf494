"""Compilation of requests' grammars outside the engine thread. A grammar is asked for and answered later, and is kept
for each tenant by itself.

One thread takes what is asked for, in the order of `grammar_queue`. A new grammar goes to a child process first
(`compile_child`), under limits of time and memory. Only a grammar that did not end the child is compiled in this
process. The child is started by `warm`, or when the first grammar comes. Once a child was killed, a spare one is kept
ready, so that the next grammar, which may be another tenant's, does not wait for a start.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from workers.engine.grammars import compile_child
from workers.engine.grammars.compile_child import QUESTIONS, VERDICTS, Start, Verdict
from workers.engine.grammars.grammar import Key, Outcome
from workers.engine.grammars.grammar_queue import GrammarQueue, GrammarsWait, Job
from workers.engine.grammars.library import Compiled, GrammarError, Library

logger = logging.getLogger(__name__)

MAX_TEXT_BYTES = 1 << 20
"""Largest size of a grammar's text. A schema of 64 KiB becomes a longer grammar, but no honest one becomes this
long."""
TENANT_ENTRIES, TENANT_BYTES = 16, 64 << 20
ALL_ENTRIES, ALL_BYTES = 256, 512 << 20
TRIM_EVERY = 256
"""Steps between two looks at how far the grammars have grown."""
START_S, ANSWER_S = 120.0, 20.0
"""Seconds of wall time for the child to be ready, and to answer. The latter is above the child's own limit, for a
machine that is busy."""
STACK_BYTES = 4 * compile_child.STACK_BYTES
"""Stack of the compiling thread. What the child came through must not overflow it."""
_TOO_MUCH = "the grammar takes too much time or memory to compile"
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit statuses that say nothing about the grammar: the child gave no answer in wall time, the machine had no memory,
or an operator ended it. The child's own limits end it by other signals."""


class Shelf:
    """Cache of compiled and refused grammars by key. The least recently used entry goes first: of the tenant, then of
    all."""

    def __init__(
        self,
        tenant_limits: tuple[int, int] = (TENANT_ENTRIES, TENANT_BYTES),
        limits: tuple[int, int] = (ALL_ENTRIES, ALL_BYTES),
    ) -> None:
        self._tenant_limits = tenant_limits
        self._limits = limits
        self._entries: OrderedDict[Key, Outcome] = OrderedDict()

    def get(self, key: Key) -> Outcome | None:
        outcome = self._entries.get(key)
        if isinstance(outcome, Compiled) and outcome.is_spent:
            del self._entries[key]
            return None
        if outcome is not None:
            self._entries.move_to_end(key)
        return outcome

    def put(self, key: Key, outcome: Outcome) -> None:
        self._entries.pop(key, None)
        self._entries[key] = outcome
        self.trim()

    def trim(self) -> None:
        """Drops what is too much by now: grammars grow while choices follow them. O(entries)."""
        by_tenant: dict[str, list[Key]] = {}
        for key in self._entries:
            by_tenant.setdefault(key[0], []).append(key)
        for keys in by_tenant.values():
            self._shrink(keys, self._tenant_limits)
        self._shrink(list(self._entries), self._limits)

    @property
    def size(self) -> tuple[int, int]:
        """Number of entries and bytes."""
        return len(self._entries), sum(map(self._bytes, self._entries))

    def _shrink(self, keys: list[Key], limits: tuple[int, int]) -> None:
        """Drops the least recently used of these entries. The newest one stays, whatever its size, because the request
        that it was made for is waiting."""
        num_bytes = sum(map(self._bytes, keys))
        for num_left, key in zip(range(len(keys), 1, -1), keys, strict=False):
            if num_left <= limits[0] and num_bytes <= limits[1]:
                return
            num_bytes -= self._bytes(key)
            del self._entries[key]

    def _bytes(self, key: Key) -> int:
        outcome = self._entries[key]
        return 0 if isinstance(outcome, GrammarError) else outcome.num_bytes


class Grammars:
    """Compiler of grammars. The engine thread calls `ask`, `drop` and `take`, none of which waits. `close` ends the
    child."""

    def __init__(
        self,
        vocabulary: Callable[[], list[bytes]],
        *,
        limit_s: float = compile_child.LIMIT_S,
        limit_bytes: int = compile_child.LIMIT_BYTES,
    ) -> None:
        self._vocabulary = vocabulary
        self._limits = (limit_s, limit_bytes)
        self._shelf = Shelf()
        self._asked: set[Key] = set()
        self._queue = GrammarQueue()
        self._done: deque[tuple[Key, Outcome]] = deque()
        self._num_takes = 0
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._child: subprocess.Popen[bytes] | None = None
        self._spare: Future[subprocess.Popen[bytes]] | None = None
        self._children: set[subprocess.Popen[bytes]] = set()
        """Child processes that any thread started and that have not ended."""
        self._starter = ThreadPoolExecutor(1, "grammar-child")
        self._start: Start | None = None
        self._library: Library | None = None

    # --- the engine thread ---

    def ask(self, key: Key, text: str) -> Compiled | None:
        """Returns the compiled grammar, or None if `take` will return it later. Raises `GrammarError` for one that was
        refused before, and `GrammarsWait` for one too many. A grammar that `take` returned with `GrammarsWait` is
        compiled again."""
        outcome = self._shelf.get(key)
        if isinstance(outcome, GrammarError):
            raise GrammarError(str(outcome))  # the traceback of the one that is kept would hold each request
        if outcome is None and key not in self._asked:
            if len(text) > MAX_TEXT_BYTES:
                raise GrammarError("the grammar is too large")
            with self._condition:
                self._queue.push(Job(key, text))
                self._condition.notify()
            self._asked.add(key)
            self._begin()
        return outcome

    def drop(self, key: Key) -> bool:
        """Cancels a grammar that nobody waits for any more. Returns False if it is being compiled, and `take` will
        return it."""
        with self._condition:
            is_dropped = self._queue.drop(key)
        if is_dropped:
            self._asked.discard(key)
        return is_dropped

    def take(self) -> list[tuple[Key, Outcome]]:
        """Returns the outcomes that were decided since the last call."""
        found = [self._done.popleft() for _ in range(len(self._done))]
        for key, outcome in found:
            self._asked.discard(key)
            if not isinstance(outcome, GrammarsWait):
                self._shelf.put(key, outcome)
        self._num_takes += 1
        if self._num_takes % TRIM_EVERY == 0:
            self._shelf.trim()
        return found

    # --- any thread ---

    def warm(self) -> None:
        """Starts the child and loads the library, so that the first grammar does not wait for them."""
        self._begin(warm=True)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        for child in tuple(self._children):
            child.kill()
        if self._thread is not None:
            self._thread.join(ANSWER_S)
        self._starter.shutdown(wait=False, cancel_futures=True)

    def _begin(self, *, warm: bool = False) -> None:
        with self._condition:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, args=(warm,), name="grammars", daemon=True)
                others = threading.stack_size(STACK_BYTES)
                try:
                    self._thread.start()
                finally:
                    threading.stack_size(others)

    # --- the compiling thread ---

    def _run(self, warm: bool) -> None:
        if warm:
            self._prepare()
        while (job := self._next()) is not None:
            began = time.monotonic()
            try:
                outcome: Outcome = self._compile(job.text)
            except GrammarError as error:
                outcome = error.with_traceback(None)  # it is kept, and the frames hold the text
            except BaseException:  # a library in Rust panics with exceptions that are no `Exception`
                # This is the thread's outermost frame: those who wait must get an answer.
                logger.exception("a grammar was not compiled", extra={"event": "grammar_failed"})
                outcome = GrammarsWait("the compiler of grammars failed")
            now = time.monotonic()
            with self._condition:
                self._queue.took(job.key[0], now - began, now)
            self._done.append((job.key, outcome))
        self._end_child()
        self._end_spare()

    def _next(self) -> Job | None:
        """Waits for a job and returns it. Returns None once closed."""
        with self._condition:
            while not len(self._queue) and not self._closed:
                self._condition.wait()
            return None if self._closed else self._queue.pop(time.monotonic())

    def _prepare(self) -> None:
        try:
            self._ready_child()
            self._loaded()
        except BaseException:  # a library in Rust panics with exceptions that are no `Exception`
            # Nobody waits yet, and the first grammar tries again.
            logger.exception("no compiler of grammars yet", extra={"event": "grammars_not_warm"})

    def _compile(self, text: str) -> Compiled:
        if fault := self._tried(text):
            raise GrammarError(fault)
        return self._loaded().compile(text)

    def _loaded(self) -> Library:
        if self._library is None:
            self._library = Library(self._told().vocabulary)
        return self._library

    def _told(self) -> Start:
        """Returns the first message to a child."""
        if self._start is None:
            self._start = Start(self._vocabulary(), *self._limits)
        return self._start

    def _tried(self, text: str) -> str:
        """Returns the child's fault with the grammar. Raises `GrammarsWait` if something else ended the child."""
        child = self._ready_child()
        verdict = self._said(child, text, ANSWER_S)
        if verdict is not None:
            return verdict.fault
        self._end_child()
        logger.warning("a grammar ended the compiler", extra={"event": "grammar_killed"})
        if self._spare is None and not self._closed:
            self._spare = self._starter.submit(self._started)
        if child.returncode in _FROM_OUTSIDE:
            raise GrammarsWait("the compiler of grammars was ended before it answered")
        return _TOO_MUCH

    def _ready_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child()
        self._told()
        if self._spare is None:
            self._child = self._started()
        else:
            ready, self._spare = self._spare, self._starter.submit(self._started)
            self._child = ready.result()
        return self._child

    def _started(self) -> subprocess.Popen[bytes]:
        """Starts a child and waits until it is ready. Raises `RuntimeError`."""
        command = [sys.executable, "-m", compile_child.__name__, str(os.getpid())]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._children.add(child)
        assert self._start is not None
        if self._closed or self._said(child, self._start, START_S) is None:
            self._end(child)
            raise RuntimeError("the compiler of grammars does not start")
        return child

    def _said(self, child: subprocess.Popen[bytes], message: Start | str, limit_s: float) -> Verdict | None:
        """Returns the child's answer. Returns None if the child died, or was killed because it gave none in time."""
        assert child.stdin is not None
        assert child.stdout is not None
        timer = threading.Timer(limit_s, child.kill)
        timer.daemon = True
        timer.start()
        try:
            child.stdin.write(QUESTIONS.encode(message))
            child.stdin.flush()
            return VERDICTS.read(child.stdout.read)
        except OSError:
            return None
        finally:
            timer.cancel()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._end(child)

    def _end_spare(self) -> None:
        if self._spare is None or self._spare.cancel():
            return
        try:
            self._end(self._spare.result())
        except RuntimeError:
            pass  # it did not start, or was ended while it did

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    pass  # unsent data is of no use any more
        child.wait()
        self._children.discard(child)
