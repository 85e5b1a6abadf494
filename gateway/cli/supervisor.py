"""Starts child processes, restarts the ones that die, stops them in order. It knows no gateway and no worker.

Children run in a session of their own (a Ctrl-C in the terminal reaches only the supervisor, which then drains them)
and die with the supervisor by a parent-death signal. What a child started and left behind, stopped or hung, is killed
when the child has ended; `Spec.lingers_s` gives it time. A child that dies is restarted at once, then with back-off. Before
the run is ready, three deaths of one child end it (crash-loop breaker). Afterwards one broken child must not take the
healthy ones away, so it is restarted every `MAX_BACKOFF_S`. A SIGKILL from outside is no crash loop: it never adds
back-off. Nor does the one that a child gets from here once it stands still. The watch over a
child outlives what fails around it, such as a full disk, a deleted log or a closed terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gateway.base.home import HomeError
from gateway.cli.heartbeats import LOOK_S, MAX_SILENT, Heartbeats
from workers.process import turns
from workers.process.children.forked import Forked, ending, fork, may_fork
from workers.process.children.parent import die_with
from workers.process.rounds import repeat

LAST_BYTES = 64 * 1024
"""The end of a log in which the last line is searched: logs grow without end."""
BREAKER_DEATHS = 3
BREAKER_WINDOW_S = 300.0
MAX_BACKOFF_S = 30.0
STOP_LIMIT_S = 75.0
MAX_LATE = 1.2
"""The longest time between two looks for hung children, as a multiple of the time that was meant. Later ones do not count."""
HEARTBEAT_FD = "HEADGATE_HEARTBEAT_FD"
GROUPS_S = 1.0
"""The time between two looks at what a child left behind that may still run."""
SPAWN_AGAIN_S = 2.0
"""The time after which a process is tried again that the machine refused to start."""


class ChildFailed(Exception):
    """A child cannot be kept running; the message is one sentence for the operator."""


class ChildRefused(ChildFailed):
    """A child refuses to start, by status 78. Another start would end in the same way."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The settings to run one child."""

    kind: str
    """The kind (gateway, worker, jobs or redis) is the key under `pids` in the ready file."""
    name: str
    """The child's name, like `gateway-0`, for its log file and messages."""
    command: Sequence[str]
    env: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()
    stop_signal: signal.Signals = signal.SIGTERM
    stop_limit_s: float = STOP_LIMIT_S
    restart_env: Mapping[str, str] | None = None
    """The environment of a restart after the run is ready, if it differs."""
    entry: str = ""
    """The module whose `main` is the process. If it is given, the first start is a fork, which shares what this process
    has loaded; a restart is always an exec of `command`.
    """
    lingers_s: float = 0.0
    """How long what it started may still run when it has died itself, to finish what is under way. A stop gives none."""
    beats: bool = False
    """Whether it beats each second (`workers/process/heartbeat.py`), so that it is killed once it is hung."""
    answers_promptly: bool = False
    """Whether it is given short turns on a core (`workers/process/turns.py`). Our own processes ask for them themselves."""


@dataclass(slots=True)
class Child:
    spec: Spec
    log: Path
    process: asyncio.subprocess.Process | Forked | None = None
    deaths: deque[float] = field(default_factory=deque)
    refusal: str = ""
    """The child's sentence why it could not start, if its last end was that."""
    group: int | None = None
    """The process group of the present process, until it has ended and what it left is looked after."""
    heartbeats: Heartbeats | None = None
    is_hung: bool = False
    """Whether the present process was killed because it stood still."""
    failure: str = ""
    """The sentence about its last end, if it has ended."""
    log_start: int = 0
    """The size of the log when the present process started: its last line is searched after it."""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def hear_anew(self) -> Heartbeats:
        """Listens to the next process, which has not begun to beat."""
        self.hear_no_more()
        self.heartbeats, self.is_hung = Heartbeats(), False
        return self.heartbeats

    def hear_no_more(self) -> None:
        if self.heartbeats is not None:
            self.heartbeats.close()
            self.heartbeats = None

    def last_line(self) -> str:
        """Returns the child's last line, or the message in it if it is a JSON log line."""
        line, record = self._last(), self.last_record()
        return str(record.get("msg") or record.get("event") or line) or "it wrote nothing to its log"

    def last_record(self) -> dict[str, object]:
        """Returns the child's last line if it is a JSON log line, otherwise nothing."""
        try:
            record = json.loads(self._last())
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    def _last(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - LAST_BYTES))
                lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:  # somebody deleted the log, for example
            return ""
        return lines[-1].strip() if lines else ""


def _fork(spec: Spec, env: Mapping[str, str], pass_fds: Collection[int], output: int) -> Forked:
    main: Callable[[], int] = importlib.import_module(spec.entry).main
    return fork(main, spec.name, env=env, output=output, keep=pass_fds, death_signal=signal.SIGKILL, own_session=True)


class Supervisor:
    """Owns all children of one `headgate up`. `on_change` is awaited after every restart."""

    def __init__(self, logs: Path, on_change: Callable[[], Awaitable[None]], look_s: float = LOOK_S) -> None:
        """Every `look_s` seconds it looks for children that are hung."""
        self._look_s = look_s
        self._looked_at = time.monotonic()
        self._looking: asyncio.Task[None] | None = None
        self._logs = logs
        self._on_change = on_change
        self._children: list[Child] = []
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._left: dict[int, float] = {}
        """The process groups of children that died and left something that may still run, with the time of its end."""
        self._group_timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self.ready = False
        """The owner sets this once every child has served: from then on no death ends the run."""
        self.failed: asyncio.Future[ChildFailed] = asyncio.get_running_loop().create_future()

    def pids(self, kind: str) -> list[int]:
        return [child.pid for child in self._children if child.spec.kind == kind and child.process]

    def processes(self) -> dict[str, int]:
        """Returns the process id of every child by its name."""
        return {child.spec.name: child.pid for child in self._children if child.process}

    def last_record(self, name: str) -> dict[str, object]:
        """Returns the last line of a child's log since it started, if that is a record; otherwise nothing."""
        child = next((child for child in self._children if child.spec.name == name), None)
        return {} if child is None or child.process is None else child.last_record()

    def refusal(self, name: str) -> str:
        """Returns why a child that has not served yet does not start: its own sentence, or how it ended. The text is
        empty while it may start. Before the run is ready, only the child's own sentence counts, and three deaths end the
        run; afterwards one end does, because what serves goes on without this child.
        """
        child = next((child for child in self._children if child.spec.name == name), None)
        return "" if child is None else child.refusal or (child.failure if self.ready else "")

    async def start(self, spec: Spec) -> None:
        child = Child(spec, self._logs / f"{spec.name}.log")
        self._children.append(child)
        await self._spawn(child)
        if spec.beats and self._looking is None:
            self._looked_at = time.monotonic()
            self._looking = asyncio.create_task(repeat(self._look_s, self._end_hung, waits_first=True))
        self._watchers[spec.name] = asyncio.create_task(self._watch(child), name=f"watch {spec.name}")

    async def _spawn(self, child: Child) -> None:
        spec = child.spec
        env = spec.restart_env if self.ready and child.process and spec.restart_env else spec.env
        pass_fds = spec.pass_fds
        if spec.beats:
            heartbeats = child.hear_anew()
            env, pass_fds = {**env, HEARTBEAT_FD: str(heartbeats.fd)}, (*pass_fds, heartbeats.fd)
        fd = os.open(child.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            child.log_start = os.fstat(fd).st_size
            if spec.entry and child.process is None and may_fork():
                child.process = _fork(spec, env, pass_fds, fd)
                child.group = child.process.pid
                return
            child.process = await asyncio.create_subprocess_exec(
                *spec.command,
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
            )
            child.group = child.process.pid
            if spec.answers_promptly:
                turns.shorten(child.process.pid)
        finally:
            os.close(fd)

    async def _watch(self, child: Child) -> None:
        """Restarts one child for as long as the breaker allows."""
        while True:
            assert child.process is not None
            code = await child.process.wait()
            self._leave_group(child, child.spec.lingers_s)
            if self._stopping or child not in self._children:
                return
            child.refusal = child.last_line() if code == os.EX_CONFIG else ""
            failure = self._judge(child, code)
            if failure is not None:
                if not self.failed.done():
                    self.failed.set_result(failure)
                return
            why = f" ({child.refusal})" if child.refusal else ""
            wait_s = MAX_BACKOFF_S if code == os.EX_CONFIG else _backoff_s(len(child.deaths))
            if wait_s:  # until then its owner may give it up
                _say(f"{child.spec.name} ended with {ending(code)}{why}.")
                await asyncio.sleep(wait_s)
                _say(f"{child.spec.name} is restarted.")
            else:
                _say(f"{child.spec.name} ended with {ending(code)}{why} and is restarted.")
            if not await self._restart(child):
                return
            await self._tell_owner()

    def _leave_group(self, child: Child, lingers_s: float = 0.0) -> None:
        """Ends what a child that has ended left behind, at the latest `lingers_s` seconds from now. It is safe to call twice."""
        if child.group is not None:
            self._left[child.group], child.group = time.monotonic() + lingers_s, None
            self._end_groups()

    def _end_groups(self) -> None:
        """Kills what children that died have left behind and that may run no longer. A group that is empty is forgotten at
        the next look.
        """
        for group, until in list(self._left.items()):
            is_over = self._stopping or time.monotonic() >= until
            try:
                os.killpg(group, signal.SIGKILL if is_over else 0)
            except (ProcessLookupError, PermissionError):  # it is empty, or its number has become somebody else's
                del self._left[group]
            else:
                if is_over:
                    del self._left[group]
        if self._group_timer is not None:
            self._group_timer.cancel()
            self._group_timer = None
        if self._left:
            self._group_timer = asyncio.get_running_loop().call_later(GROUPS_S, self._end_groups)

    async def _restart(self, child: Child) -> bool:
        """Starts a child again, however long the machine has no process, memory or file for it. Returns False if the
        child is not wanted any more.
        """
        while not self._stopping and child in self._children:
            try:
                await self._spawn(child)
            except (OSError, subprocess.SubprocessError) as error:
                _say(f"{child.spec.name} cannot be started now and is tried again: {error}.")
                await asyncio.sleep(SPAWN_AGAIN_S)
            else:
                if self._stopping and child.process is not None:  # it began as the others were told to stop
                    child.process.send_signal(child.spec.stop_signal)
                return True
        return False

    async def _tell_owner(self) -> None:
        try:
            await self._on_change()
        except (OSError, HomeError) as error:  # the disk is full, for example
            _say(f"The ready file names an older process until the next change: {error}")

    def _end_hung(self) -> None:
        """Kills the children that stand still, so that they are restarted. A late look tells nothing: this process
        had no core, so they may have had none, or all of them were stopped together.
        """
        now = time.monotonic()
        is_late, self._looked_at = now - self._looked_at > MAX_LATE * self._look_s, now
        for child in [] if self._stopping else self._children:
            heartbeats, process = child.heartbeats, child.process
            if heartbeats is None or process is None or process.returncode is not None or child.is_hung:
                continue
            if is_late:
                heartbeats.forgive()
            elif heartbeats.look():
                child.is_hung = True
                _say(f"{child.spec.name} has stood still for {MAX_SILENT * self._look_s:.0f} s and is killed.")
                process.kill()

    def _judge(self, child: Child, code: int) -> ChildFailed | None:
        """Counts the death and words it. Returns None if the child is to be restarted."""
        if child.refusal and not self.ready:  # it must not be restarted
            return ChildRefused(child.refusal)
        name, told = child.spec.name, f"{child.last_line()} (see {child.log})"
        if code == -signal.SIGKILL:
            end = f"{ending(code)}, as the kernel ends a process where memory is short"
            if child.is_hung:
                end = f"{ending(code)}, because it stood still"
            child.failure = f"{name} ended with {end}: {told}"
            return None
        child.failure = f"{name} ended with {ending(code)}: {told}"
        now = time.monotonic()
        child.deaths.append(now)
        while child.deaths[0] < now - BREAKER_WINDOW_S:
            child.deaths.popleft()
        if self.ready or len(child.deaths) < BREAKER_DEATHS:
            return None
        return ChildFailed(f"{name} died {BREAKER_DEATHS} times at start, last with {ending(code)}: {told}")

    def begin_stop(self) -> None:
        """Ends restarts: from now on a child that ends is not restarted."""
        self._stopping = True

    async def stop(self, kind: str) -> None:
        """Asks every child of a kind to end, waits, then kills those that are left."""
        self._stopping = True
        children = [c for c in self._children if c.spec.kind == kind and c.process and c.process.returncode is None]
        for child in children:
            child.process.send_signal(child.spec.stop_signal)  # type: ignore[union-attr]  # filtered two lines above
        await asyncio.gather(*(self._wait(child) for child in children))

    async def remove(self, name: str) -> None:
        """Stops one child for good while the others run on. One that was never started is no fault."""
        child = next((child for child in self._children if child.spec.name == name), None)
        if child is None:
            return
        self._children.remove(child)
        if child.process is not None and child.process.returncode is None:
            child.process.send_signal(child.spec.stop_signal)
            await self._wait(child)
        self._leave_group(child)
        child.hear_no_more()
        watcher = self._watchers.pop(name)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)

    def signal(self, kind: str, number: signal.Signals) -> None:
        """Sends a signal to every running child of a kind."""
        for child in self._children:
            if child.spec.kind == kind and child.process and child.process.returncode is None:
                child.process.send_signal(number)

    async def _wait(self, child: Child) -> None:
        assert child.process is not None
        try:
            async with asyncio.timeout(child.spec.stop_limit_s):
                await child.process.wait()
        except TimeoutError:
            _say(f"{child.spec.name} did not end within {child.spec.stop_limit_s:.0f} s and is killed.")
            child.process.kill()
            await child.process.wait()

    def kill_all(self) -> None:
        """Kills all children, at the second Ctrl-C."""
        self._stopping = True
        for child in self._children:
            if child.process and child.process.returncode is None:
                child.process.kill()

    async def close(self) -> None:
        """Ends the watchers, after every child was stopped or killed: neither a watcher nor a zombie outlives the
        supervisor.
        """
        tasks = [*self._watchers.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stopping = True
        for child in self._children:
            if child.process is not None:
                await child.process.wait()
            self._leave_group(child)
            child.hear_no_more()
        self._end_groups()


def _say(line: str) -> None:
    """Tells the operator. A terminal or pipe that is gone hears nothing, and that is no fault of a child."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _backoff_s(num_deaths: int) -> float:
    return 0.0 if num_deaths <= 1 else min(MAX_BACKOFF_S, 2.0 ** (num_deaths - 2))
