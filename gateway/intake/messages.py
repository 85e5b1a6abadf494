"""Bounds a message of a WebSocket while it is not whole, as the body of a request is bounded: bytes, framing and time.

aiohttp keeps such a message where nobody sees it. So its frames are followed from outside, without their content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.base import errors
from gateway.intake.intake import Intake

MAX_FRAMING_BYTES = 16 * 1024
"""The number of bytes of frames' heads, beside an eighth of what is in the frames: even an empty one takes a microsecond."""
_LAST = 0x80
_CONTROL = 0x08


class FramingTooLarge(Exception):
    """Messages came in so many small frames that they are more work than what is in them."""


class Frames:
    """Follows where the frames and messages of a client end (RFC 6455, 5.2). It is pure."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """The bytes of a message that is not whole, as far as they have come."""
        self.num_ended = 0
        """The messages that are whole."""
        self._head = b""
        self._left = 0
        self._num_framing = 0
        self._num_framed = 0
        self._is_control = False
        self._is_last = True
        """Whether no further frame of the message follows."""

    @property
    def is_between(self) -> bool:
        """Returns whether nothing of a next message or frame has come."""
        return self._is_last and not self._left and not self._head

    def feed(self, data: bytes) -> None:
        """Takes what has come. Raises `FramingTooLarge`."""
        if self.is_between:
            self._num_framing = self._num_framed = 0
        data, at = self._head + data, 0
        while at < len(data):
            if not self._left:
                num_head = self._begin(data, at)
                if not num_head:
                    break
                at += num_head
            step = min(self._left, len(data) - at)
            at += step
            self._take(step)
        self._head = data[at:]

    def _begin(self, data: bytes, at: int) -> int:
        """Reads the head of a frame and returns its length: 0 if it is not whole."""
        if len(data) < at + 2:
            return 0
        first, second = data[at], data[at + 1]
        num_length = {126: 2, 127: 8}.get(second & 0x7F, 0)
        num_head = 2 + num_length + (4 if second & 0x80 else 0)
        if len(data) < at + num_head:
            return 0
        self._left = int.from_bytes(data[at + 2 : at + 2 + num_length], "big") if num_length else second & 0x7F
        self._is_control = bool(first & _CONTROL)
        if not self._is_control:
            self._is_last = bool(first & _LAST)
        self._num_framing += num_head
        if self._num_framing > MAX_FRAMING_BYTES + self._num_framed // 8:
            raise FramingTooLarge
        return num_head

    def _take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        self._num_framed += num_bytes
        if self._is_control:
            return
        self.num_bytes += num_bytes
        if self._is_last and not self._left:
            self.num_bytes = 0
            self.num_ended += 1


class Unfinished:
    """The message that comes on a connection: its bytes are its tenant's, and it keeps a rate. Else `end` is called."""

    def __init__(
        self, intake: Intake, tenant_id: str, most_s: float, min_bytes_per_s: int, end: Callable[[], None]
    ) -> None:
        self._intake = intake
        self._tenant_id = tenant_id
        self._most_s = most_s
        self._min_bytes_per_s = min_bytes_per_s
        self._end = end
        self._frames = Frames()
        self._num_held = 0
        self._began_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def feed(self, data: bytes) -> None:
        """Takes what has come, before it is read."""
        if self._is_closed:
            return
        num_ended = self._frames.num_ended
        try:
            self._frames.feed(data)
            self._hold(self._frames.num_bytes)
        except (FramingTooLarge, errors.ApiError):
            self._end()
            return
        if self._frames.is_between or self._frames.num_ended > num_ended:
            self._stop_timer()
        if not self._frames.is_between and self._timer is None:
            loop = asyncio.get_running_loop()
            self._began_at = loop.time()
            self._timer = loop.call_later(self._most_s, self._judge)

    def close(self) -> None:
        self._is_closed = True
        self._stop_timer()
        self._hold(0)

    def _judge(self) -> None:
        """Ends a message that has taken longer than a body may, unless it keeps the rate."""
        loop = asyncio.get_running_loop()
        until = self._began_at + max(self._most_s, self._frames.num_bytes / self._min_bytes_per_s)
        if loop.time() >= until:
            self._end()
        else:
            self._timer = loop.call_at(until, self._judge)

    def _hold(self, num_bytes: int) -> None:
        more = num_bytes - self._num_held
        if more > 0:
            self._intake.take(self._tenant_id, more, counts=False)
        else:
            self._intake.give_back(self._tenant_id, -more)
        self._num_held = num_bytes

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
