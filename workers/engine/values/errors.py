"""Exceptions for what a caller of the engine can cause. Each one has a clear sentence as its message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the arithmetic of `capacity` needs the standard library only
    from workers.process.refused_settings import Problem
    from workers.protocol.messages import FailCode


class StartError(Exception):
    """The process cannot start. The message is the sentence to print, about the first of the problems with settings."""

    def __init__(self, sentence: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(sentence)
        self.problems = problems


class CannotStartYet(StartError):
    """The process cannot start because of something that may change while its settings stay, such as a disk that is
    full or not mounted. The same start may succeed later."""


class ModelError(StartError):
    """A model cannot be served because of its directory, its checkpoint or its architecture. The message is one
    sentence."""


class Refusal(Exception):
    """This worker will not run a request. The refusal becomes the `Failed` message of the request's attempt."""

    def __init__(self, code: FailCode, message: str, *, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_ms = retry_after_ms


class EngineBroken(Exception):
    """A step failed although no request had a part in it. The device cannot be trusted any more; a fresh process
    can."""


class DeviceOutOfMemory(Exception):
    """A step did not fit the device's memory. None of its results count. A smaller step may fit."""
