"""The writer of OpenAI's chat and completions: bodies and chunks around choices, whose forms are `ChoiceForm`s. The
module is pure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from accounting.values.types import Usage
from gateway.base import ids
from gateway.base.errors import ApiError
from gateway.generation.generation import ChoicePiece
from gateway.generation.served.models import fingerprint
from gateway.generation.stream import Numbered
from gateway.generation.writer import Ending
from gateway.http.sse import CHAT
from gateway.parsers.parts import Text
from gateway.schema.sampling import SamplingFields
from gateway.text.choice import Piece

LOGPROB_FLOOR = -9999.0
_MARK = "\x00the text of a chunk"
"""A text that stands in the place of a chunk's text. No field before it can be equal to it."""


class ChoiceForm(Protocol):
    """The form in which one endpoint writes a choice."""

    @property
    def body_object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...
    @property
    def id_prefix(self) -> str: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the choice in its first chunk, if that chunk has no text."""
        ...

    def parts(self, index: int, piece: ChoicePiece) -> list[dict[str, Any]]:
        """Returns the choice in each chunk of a piece."""
        ...

    def plain(self, piece: ChoicePiece) -> str | None:
        """Returns the text of a piece of which `parts` would show nothing but this text, in one chunk; else None."""
        ...

    def closing(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        """Returns the choice in its last chunk."""
        ...

    def whole(self, index: int, pieces: Sequence[ChoicePiece]) -> Any:
        """Returns the choice in a body."""
        ...


class ChunkWriter:
    """The writer (`gateway/generation/writer.py`) of one answer. The very last closing chunk waits for the settlement."""

    style = CHAT

    def __init__(self, form: ChoiceForm, fields: SamplingFields, num_choices: int) -> None:
        self._form = form
        self._fields = fields
        self._num_choices = self._num_open = num_choices
        self._id = ids.object_id(form.id_prefix)
        self._created = int(time.time())
        self._root = ""
        self._last: dict[str, Any] | None = None
        self.of_prompt: dict[str, Any] = {}
        """Fields of the body, or of the first chunk, that speak of the prompt."""
        self.ending_so_far: Callable[[], Ending] | None = None
        """Returns the usage so far, which each chunk then has."""
        self._usage: dict[str, Any] | None = None
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """The bytes before and after the text in a chunk with nothing but text, by the index of its choice."""

    def opening(self, root: str) -> list[Any]:
        self._root = root
        self._look()
        choices = [self._form.opening(index) for index in range(self._num_choices)]
        first = self.of_prompt
        chunks = []
        for choice in choices:
            if choice is not None:
                chunks.append(self._chunk([choice], **first))
                first = {}
        return chunks

    def _look(self) -> None:
        if self.ending_so_far is not None:
            self._usage = usage_of(self.ending_so_far())

    def of(self, found: Sequence[Numbered]) -> list[Any]:
        self._look()
        chunks: list[Any] = []
        for numbered in found:
            index, piece = numbered.index, numbered.piece
            text = None if self._usage is not None else self._form.plain(piece)
            if text is not None:
                chunks.append(self._plain(index, text))
            else:
                chunks += [self._chunk([choice]) for choice in self._form.parts(index, piece)]
            if piece.finish is not None:
                self._num_open -= 1
                closing = self._form.closing(index, piece)
                if self._num_open:
                    chunks.append(self._chunk([closing]))
                else:
                    self._last = closing
        return chunks

    def _plain(self, index: int, text: str) -> msgspec.Raw:
        """Returns a chunk with nothing but text. All of them are equal but for the text, so the rest is encoded once."""
        around = self._around.get(index)
        if around is None:
            (choice,) = self._form.parts(index, ChoicePiece(index, Piece(_MARK), parts=[Text(_MARK)]))
            before, behind = msgspec.json.encode(self._chunk([choice])).split(msgspec.json.encode(_MARK), 1)
            around = self._around[index] = (before, behind)
        return msgspec.Raw(b"%b%b%b" % (around[0], msgspec.json.encode(text), around[1]))

    def closing(self, ending: Ending) -> list[Any]:
        self._look()
        if not self._fields.include_usage:
            return [self._chunk([self._last], headgate=ending.headgate)]
        return [self._chunk([self._last]), self._chunk([], usage=usage_of(ending), headgate=ending.headgate)]

    def choice(self, index: int, pieces: Sequence[ChoicePiece]) -> Any:
        return self._form.whole(index, pieces)

    def whole(self, root: str, choices: Sequence[Any], ending: Ending) -> Any:
        self._root = root
        more = self.of_prompt
        return self._make(self._form.body_object, choices, usage=usage_of(ending), headgate=ending.headgate, **more)

    def failed(self, error: ApiError, request_id: str) -> list[Any]:
        """Returns one event without a finish, so that a client that overlooks it does not take the text for whole."""
        event = {
            "type": error.type,
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "request_id": request_id,
            "retryable": error.status == 503,
        }
        return [{"error": event}]

    def _chunk(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        if self._fields.include_usage:
            more.setdefault("usage", self._usage)
        return self._make(self._form.chunk_object, choices, **more)

    def _make(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        envelope = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._fields.model,
            "system_fingerprint": fingerprint(self._root),
            "choices": choices,
        }
        if self._fields.service_tier is not None:
            envelope["service_tier"] = "default"
        if self._fields.metadata is not None:
            envelope["metadata"] = self._fields.metadata
        return envelope | more


def usage_of(ending: Ending) -> dict[str, Any]:
    """Returns the usage in OpenAI's shape: the prompt includes cached tokens; details are present even
    if they are 0.
    """
    usage: Usage = ending.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "completion_tokens_details": {"reasoning_tokens": ending.num_reasoning},
    }


def finish_of(piece: ChoicePiece) -> dict[str, Any]:
    return {"finish_reason": piece.finish, "stop_reason": piece.stop_reason}


def tokens_of(pieces: Sequence[ChoicePiece]) -> list[int]:
    """Returns the tokens of a choice, as many as it is charged for, those without text included."""
    shown = [entry.token for piece in pieces for entry in piece.piece.entries]
    return [*shown, *(token for piece in pieces for token in piece.piece.unshown)]


def id_name(token: int) -> str:
    """Returns the name of a token in logprobs where its text is not wanted."""
    return f"token_id:{token}"


def finite(logprob: float | None) -> float | None:
    """Replaces NaN and infinities, because JSON has neither."""
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) and logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
