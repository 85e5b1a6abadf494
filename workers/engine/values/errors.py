"""What a caller of the engine can cause, as exceptions with one clear sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the arithmetic of `capacity` needs the standard library only
    from workers.protocol.messages import FailCode


class StartError(Exception):
    """The process cannot start; the message is the sentence to print."""


class ModelError(StartError):
    """A model cannot be served: its directory, its checkpoint or its architecture. The text is one sentence."""


class Refusal(Exception):
    """A request that this worker will not run: becomes the `Failed` of its attempt."""

    def __init__(self, code: FailCode, message: str, *, retryable: bool = False, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.retry_after_ms = retry_after_ms


class EngineBroken(Exception):
    """A step failed in which no request had a part: the device is not to be trusted, a fresh process is."""


class DeviceOutOfMemory(Exception):
    """A step did not fit the device's memory. Nothing of it counts; a smaller one may fit."""
