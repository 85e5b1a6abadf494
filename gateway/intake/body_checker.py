"""Checks large bodies in a process of its own, because a thread that reads JSON holds up the loop: it takes the
interpreter lock whenever the loop waits for an event, and the loop waits to get it back. A refused body costs the loop
no more than its arrival this way, and a sound one is only decoded here.

The process is started for the first large body, and ends with the gateway. While it starts, and for a while after it was
lost, bodies are checked where they are decoded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Literal

import msgspec
from aiohttp import web

from gateway.base import errors
from gateway.intake.checking_process import Refused, Sound
from gateway.intake.json_pieces import Cut

logger = logging.getLogger(__name__)

ANSWER_S = 20
"""The seconds for sending a body, and for the answer. A body of 4 MiB takes 30 ms on a machine at rest."""
PAUSE_S = 10.0
"""The seconds without a new process after one was lost or did not start."""
CLOSE_S = 5.0

_ANSWERS = msgspec.msgpack.Decoder(Refused | Sound)


class BodyChecker:
    """The processes, as many as bodies are checked at a time: as many as there are text threads, at most. Any thread may
    call `check`. `close` ends them.
    """

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._not_before = 0.0
        self._is_closed = False
        self._counting = threading.Lock()
        self.num_checked: dict[Literal["process", "gateway"], int] = {"process": 0, "gateway": 0}
        """Bodies by where they were checked."""

    def check(self, body: bytes) -> list[Cut] | None:
        """Returns what `decode_object` and `decode_stored` take as `cuts`: None if there is no process to ask, so that they
        check the body. Raises `ApiError` 400.
        """
        answer = self._asked(body)
        with self._counting:
            self.num_checked["gateway" if answer is None else "process"] += 1
        if isinstance(answer, Refused):
            raise errors.ApiError(answer.status, answer.message, code=answer.code, param=answer.param)
        return answer.cuts if answer is not None else None

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().end()

    def _asked(self, body: bytes) -> Refused | Sound | None:
        """Returns a process's answer, or None if there is no process to ask."""
        process = self._taken()
        if process is None:
            return None
        try:
            answer = process.ask(body) if process.is_ready() else None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            self._not_before = time.monotonic() + PAUSE_S
            process.end()
            logger.warning("body_checker_lost", extra={"checker_pid": process.pid, "error": repr(error)})
            return None
        self._idle.append(process)
        if self._is_closed:
            self.close()
        return answer

    def _taken(self) -> _Process | None:
        """Takes an idle process, or starts one."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        if self._is_closed or time.monotonic() < self._not_before:
            return None
        try:
            return _Process()
        except OSError as error:
            self._not_before = time.monotonic() + PAUSE_S
            logger.warning("body_checker_not_started", extra={"error": str(error)})
            return None


class _Process:
    """One process and the link to it. Raises `OSError` if it cannot be started."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", ANSWER_S, 0))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway.intake.checking_process", str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's signals are for the gateway
            )
            self._link = Connection(ours.detach())
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self) -> bool:
        """Raises `EOFError` if the process ended while it started."""
        if not self._is_ready and self._link.poll(0):
            self._link.recv_bytes()
            self._is_ready = True
        return self._is_ready

    def ask(self, body: bytes) -> Refused | Sound:
        """Raises `OSError` or `EOFError` if the process is gone or silent for too long, and `MsgspecError` if it is of
        another version than this gateway.
        """
        self._link.send_bytes(body)
        answer: Refused | Sound = _ANSWERS.decode(self._link.recv_bytes())
        return answer

    def end(self) -> None:
        """Ends the process by closing the link, or else by force."""
        self._link.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


BODY_CHECKER = web.AppKey("body_checker", BodyChecker)
