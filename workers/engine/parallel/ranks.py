"""The processes of the other ranks, as rank 0 sees them: it starts them, receives from them, and ends them. It loads no
torch.

A worker that has lost a rank cannot compute and may hang in a collective, where nothing can wake it. So the watchers
here end the whole process, as a crash would: the journal is written before each frame leaves, and gateways end its
requests free of charge. A rank in turn dies with rank 0 (`follower`), so neither side outlives the other.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from workers.engine.parallel.wire import Channel, Ended, Leave, Loaded, Said, frame
from workers.process.children.forked import ending

logger = logging.getLogger(__name__)

EXIT_LOST = 2
"""Exit status of a worker that lost a rank, the same as after an engine failure: the supervisor starts a new worker."""
_LEAVE_S = 5.0
_NEWS_S = 3.0
_FOLLOWER = [sys.executable, "-m", "workers.engine.follower"]


class _Process:
    def __init__(self, rank: int, size: int, meeting: Path, command: Sequence[str]) -> None:
        mine, its = socket.socketpair()
        with its:
            told = [str(rank), str(size), str(its.fileno()), str(meeting), str(os.getpid())]
            self.process = subprocess.Popen([*command, *told], stdin=subprocess.DEVNULL, pass_fds=(its.fileno(),))
        self.rank = rank
        self.channel = Channel(mine)
        self.loaded = threading.Event()


class Ranks:
    """A context: inside it `size - 1` other processes run. With a size of 1 there are none."""

    def __init__(self, size: int, meeting: Path, command: Sequence[str] = _FOLLOWER) -> None:
        """The ranks find each other by the file `meeting`, which must not exist yet."""
        self.size = size
        self.meeting = meeting
        self._command = command
        self._others: list[_Process] = []
        self._ending = threading.Lock()
        self._left = False

    def __enter__(self) -> Ranks:
        if self.size > 1:
            self.meeting.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_forgotten(self.meeting)
        for rank in range(1, self.size):
            other = _Process(rank, self.size, self.meeting, self._command)
            self._others.append(other)
            about = {"event": "rank_started", "rank": rank, "rank_pid": other.process.pid}
            logger.info("rank %d of %d started", rank, self.size, extra=about)
            threading.Thread(target=self._watch, args=(other,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, RuntimeError):
            self.wait_for_news()
        self._leave(kill=error is not None)

    @property
    def pids(self) -> list[int]:
        return [other.process.pid for other in self._others]

    def send(self, message: Said) -> None:
        """Sends a message to all ranks. A dead rank is handled by its watcher."""
        data = frame(message)
        for other in self._others:
            try:
                other.channel.send(data)
            except OSError:
                self.wait_for_news()

    def wait_until_loaded(self) -> None:
        """Waits without a limit until all ranks have loaded: a rank either loads or dies."""
        for other in self._others:
            other.loaded.wait()

    def wait_for_news(self) -> None:
        """Waits after a failed collective: most often a rank has died, and its watcher gives the better message. The
        watcher then ends this process, and the call does not return."""
        if self._others:
            threading.Event().wait(_NEWS_S)

    def _watch(self, other: _Process) -> None:
        sentence, status = "", EXIT_LOST
        while (said := other.channel.receive()) is not None:
            if isinstance(said, Loaded):
                logger.info("rank %d loaded", other.rank, extra={"event": "rank_loaded"})
                other.loaded.set()
            elif isinstance(said, Ended):
                sentence, status = said.sentence, said.status
                break
        if not sentence:
            sentence = f"Rank {other.rank} of {self.size} ended with {_ending(other.process)}."
        with self._ending:
            if not self._left:
                self._end(other, sentence, status)

    def _end(self, lost: _Process, sentence: str, status: int) -> NoReturn:
        if lost.loaded.is_set():
            about = {"event": "rank_lost", "rank": lost.rank}
            logger.critical("%s The worker ends.", sentence, extra=about)
        else:
            print(sentence, file=sys.stderr, flush=True)
        for other in self._others:
            other.process.kill()
        self.meeting.unlink(missing_ok=True)
        os._exit(status)

    def _leave(self, *, kill: bool) -> None:
        with self._ending:
            self._left = True
        if not kill:
            self.send(Leave())
        for other in self._others:
            try:
                other.process.wait(0 if kill else _LEAVE_S)
            except subprocess.TimeoutExpired:
                other.process.kill()
                other.process.wait()
            other.channel.close()
        if self._others:
            self.meeting.unlink(missing_ok=True)


def meeting_file(run_directory: Path, worker: str) -> Path:
    return run_directory / f"{worker}.{os.getpid()}.ranks"


def _remove_forgotten(meeting: Path) -> None:
    """Removes files of killed workers with this worker's name."""
    worker, _, _ = meeting.name.partition(".")
    for path in meeting.parent.glob(f"{worker}.*.ranks"):
        pid = path.name.split(".")[1]
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        return ending(process.wait(_NEWS_S))
    except subprocess.TimeoutExpired:
        return "a closed channel"
