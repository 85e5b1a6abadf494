"""The interface of writers: how an endpoint writes its answer, as one body or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from accounting.values.types import Usage
from gateway.base.errors import ApiError
from gateway.generation.generation import ChoicePiece
from gateway.generation.stream import Numbered
from gateway.http.sse import EventStyle


class Ending(msgspec.Struct, frozen=True):
    """The facts of an answer that are known once it is settled."""

    usage: Usage
    num_reasoning: int
    """The number of output tokens that are reasoning."""
    headgate: dict[str, Any]
    """The `headgate` object of api.md 4.2."""


class Writer(Protocol):
    """The writer of one answer. A plan has one of its own, which may keep state. A body and a stream are made from the
    same pieces, so they cannot differ. It is pure.
    """

    @property
    def style(self) -> EventStyle:
        """The way in which the events of the stream are written."""
        ...

    def opening(self, root: str) -> list[Any]:
        """Returns the events in front of the first text. `root` is that of the worker that answers."""
        ...

    def of(self, found: Sequence[Numbered]) -> list[Any]:
        """Returns the events of new pieces. The last event of the answer is kept back."""
        ...

    def closing(self, ending: Ending) -> list[Any]:
        """Returns the events that wait for the settlement. It is called twice under an idempotency key, and returns
        the same events.
        """
        ...

    def choice(self, index: int, pieces: Sequence[ChoicePiece]) -> Any:
        """Returns one choice of a body, for `whole`. It runs in a thread if the choice has many logprobs."""
        ...

    def whole(self, root: str, choices: Sequence[Any], ending: Ending) -> Any:
        """Returns the body, a JSON value. It is called twice under an idempotency key."""
        ...

    def failed(self, error: ApiError, request_id: str) -> list[Any]:
        """Returns the events of a failure in mid-stream. The stream then ends without `[DONE]`."""
        ...
