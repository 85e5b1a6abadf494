"""The writer of `/v1/responses`: the Response object, and its events with their numbers. The module is pure."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accounting.values.types import Usage
from gateway.base.errors import ApiError
from gateway.generation.generation import ChoicePiece
from gateway.generation.stream import Numbered
from gateway.generation.writer import Ending
from gateway.http.sse import RESPONSES
from gateway.parsers.parts import Text
from gateway.text.choice import TokenEntry
from gateway.text.tokenizer import ModelTokenizer
from gateway.writers.chat import logprobs_of
from gateway.writers.response_items import Event, ResponseItems, Seal

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
PREFIX = "resp_"
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finishes that leave a response incomplete, and the reason that it tells."""


@dataclass(frozen=True)
class Bill:
    """The cost of a run that has no whole answer, as clients see it."""

    usage: dict[str, Any]
    headgate: dict[str, Any]


class ResponseWriter:
    """The writer (`gateway/generation/writer.py`) of one response. Body and events are made by one `ResponseItems`."""

    style = RESPONSES

    def __init__(
        self,
        response_id: str,
        echo: Mapping[str, Any],
        tokenizer: ModelTokenizer | None = None,
        seal: Seal | None = None,
        created_at: int | None = None,
        names: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """`echo` has the fields that repeat the request. With `tokenizer` texts have logprobs, with `seal` reasoning
        has an encrypted form. `names` has the (namespace, name) of functions in namespaces.
        """
        self._id = response_id
        self._echo = echo
        self._tokenizer = tokenizer
        self._created_at = int(time.time()) if created_at is None else created_at
        self._next = 0
        self._is_open = False
        self._ended_at = 0
        self._finish: str | None = None
        self._pending: list[TokenEntry] = []
        """The tokens from the last piece with parts on, or behind the last text."""
        self._unread = ""
        """The output from there on."""
        self._num_chars = 0
        self._output = ResponseItems(response_id.removeprefix(PREFIX), seal, names)

    def waiting(self) -> list[Any]:
        """Returns the first events of a response that waits for its run in the background."""
        self._is_open = True
        kinds = ("response.created", "response.queued")
        return self._number([{"type": kind, "response": self.response("queued")} for kind in kinds])

    def go_on(self, next_number: int, *, is_open: bool) -> None:
        """Numbers the next event. With `is_open` clients have seen the begin of this very run."""
        self._next, self._is_open = next_number, is_open

    def opening(self, root: str) -> list[Any]:
        kinds = ["response.in_progress"] if self._is_open else ["response.created", "response.in_progress"]
        self._is_open = True
        return self._number([{"type": kind, "response": self.response("in_progress")} for kind in kinds])

    def of(self, found: Sequence[Numbered]) -> list[Any]:
        return self._number([event for numbered in found for event in self._take(numbered.piece)])

    def closing(self, ending: Ending) -> list[Any]:
        body = self.response(self._status, ending)
        return [{"type": f"response.{self._status}", "response": body, "sequence_number": self._next}]

    def choice(self, index: int, pieces: Sequence[ChoicePiece]) -> Any:
        for piece in pieces:
            self._take(piece)

    def whole(self, root: str, choices: Sequence[Any], ending: Ending) -> Any:
        return self.response(self._status, ending)

    def failed(self, error: ApiError, request_id: str) -> list[Any]:
        return self._failed(self.failure(error, request_id))

    def failure(self, error: ApiError, request_id: str) -> dict[str, Any]:
        return self.response("failed") | failed_fields(error, request_id)

    def ended(self, error: ApiError, request_id: str, bill: Bill | None) -> tuple[dict[str, Any], list[Any]]:
        """Ends a run that failed. Returns the Response object and the last events. A `bill` is told where the failure is
        not free, as when the key was revoked.
        """
        body = self.failure(error, request_id)
        if bill is not None:
            body |= {"usage": bill.usage, "headgate": body["headgate"] | bill.headgate}
        return body, self._failed(body)

    def _failed(self, body: dict[str, Any]) -> list[Any]:
        events = [] if self._is_open else self.opening("")
        return events + self._number([{"type": "response.failed", "response": body}])

    def response(self, status: Status, ending: Ending | None = None) -> dict[str, Any]:
        """Returns the Response object with the output so far."""
        reason = {"reason": _CUT[self._finish]} if status == "incomplete" and self._finish else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._ended_at if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            **self._echo,
            "output": self._output.shown(),
            "usage": None if ending is None else usage_of(ending.usage, ending.num_reasoning),
            **({} if ending is None else {"headgate": ending.headgate}),
        }

    def cancelled(self, usage: Usage, num_reasoning: int) -> tuple[dict[str, Any], list[Any]]:
        """Ends the output where it is. Returns the Response object and the last events."""
        events = self._output.end(is_whole=False)
        body = self.response("cancelled") | {"usage": usage_of(usage, num_reasoning)}
        return body, self._number([*events, {"type": "response.cancelled", "response": body}])

    @property
    def next_number(self) -> int:
        return self._next

    @property
    def _status(self) -> Status:
        return "incomplete" if self._finish in _CUT else "completed"

    def _take(self, piece: ChoicePiece) -> list[Event]:
        """Adds a piece. A token's logprob goes out with the next text; those of reasoning and of calls do not."""
        logprobs: list[Any] = []
        if self._tokenizer is not None:
            self._pending += piece.piece.entries
            self._unread += piece.piece.text
            self._num_chars += len(piece.piece.text)
            text = next((part.text for part in piece.parts if isinstance(part, Text)), None)
            if text is not None:
                logprobs = [logprobs_of(self._tokenizer, entry) for entry in self._pending[self._first_of(text) :]]
                self._pending, self._unread = [], ""
            elif piece.parts:  # the begin of a text may stand behind them, and wait
                self._pending, self._unread = list(piece.piece.entries), piece.piece.text
        events = self._output.push(piece.parts, logprobs)
        if piece.finish is not None:
            self._finish, self._ended_at = piece.finish, int(time.time())
            events += self._output.end(is_whole=piece.finish not in _CUT)
        return events

    def _first_of(self, text: str) -> int:
        """Returns the first pending token of a text. Where it begins a message, there may be tokens of reasoning, of a call
        and of marks before it.
        """
        if self._output.is_in_message:
            return 0
        begin = self._num_chars - len(self._unread) + max(0, self._unread.rfind(text))
        first = bisect_left(self._pending, begin, key=lambda entry: entry.offset)
        is_whole = first < len(self._pending) and self._pending[first].offset == begin
        return first if is_whole else max(0, first - 1)  # a token may begin before the text and reach into it

    def _number(self, events: list[Event]) -> list[Any]:
        for event in events:
            event["sequence_number"] = self._next
            self._next += 1
        return events


def usage_of(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    """Returns the usage: the input includes cached tokens; details are present even if they are 0."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.total,
    }


def failed_fields(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the fields of a response that has failed. Its code is one that clients know; ours is in `headgate`."""
    code = "server_error" if error.status >= 500 else error.code or error.type
    headgate = {"request_id": request_id, "code": error.code, "retryable": error.status == 503}
    return {"error": {"code": code, "message": error.message}, "headgate": headgate}
