"""A choice of completions: text with the echo of its prompt, and logprobs in four arrays. The module is pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.generation.generation import ChoicePiece
from gateway.text.choice import TokenEntry
from gateway.text.tokenizer import ModelTokenizer
from gateway.writers.chunks import finish_of, finite, id_name, tokens_of
from workers.protocol.messages import TokenLogprob


@dataclass(frozen=True)
class Echo:
    """One prompt as it is written in front of its completions."""

    text: str
    logprobs: dict[str, bytes] | None = None
    """The prompt's logprobs in the form that clients see: four JSON arrays (`EchoArrays`)."""


@dataclass
class CompletionForm:
    tokenizer: ModelTokenizer
    num_logprobs: int
    echoes: dict[int, Echo] = field(default_factory=dict)
    """The echo of each prompt by its number, filled in once the engine has scored the prompt."""
    num_choices: int = 1
    with_ids: bool = False
    """Choices and chunks have the ids of their tokens."""
    names_ids: bool = False
    """Logprobs name tokens by their ids."""
    prompts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The fields that each prompt's choices have of it, where an echo would."""
    body_object: str = "text_completion"
    chunk_object: str = "text_completion"
    id_prefix: str = "cmpl-"
    _echoed: set[int] = field(default_factory=set)

    def opening(self, index: int) -> None:
        return None

    def parts(self, index: int, piece: ChoicePiece) -> list[dict[str, Any]]:
        if not piece.piece.text and not piece.piece.entries:
            return []
        return [self._choice(index, [piece], with_echo=self._first_of(index)) | {"finish_reason": None}]

    def plain(self, piece: ChoicePiece) -> str | None:
        if self.num_logprobs >= 0 or self.with_ids or self.echoes or self.prompts:
            return None
        return piece.piece.text or None

    def closing(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        """The last chunk has the echo alone, if there was no other text."""
        choice = self._choice(index, [], with_echo=self._first_of(index)) | finish_of(piece)
        return choice | self._ids(piece.piece.unshown)

    def whole(self, index: int, pieces: Sequence[ChoicePiece]) -> msgspec.Raw:
        """Returns JSON, because a choice with logprobs may have megabytes."""
        choice = self._choice(index, pieces, with_echo=True) | finish_of(pieces[-1])
        return msgspec.Raw(msgspec.json.encode(choice | self._ids(tokens_of(pieces))))

    def _first_of(self, index: int) -> bool:
        is_first = index not in self._echoed
        self._echoed.add(index)
        return is_first

    def _choice(self, index: int, pieces: Sequence[ChoicePiece], *, with_echo: bool) -> dict[str, Any]:
        echo = self.echoes[index // self.num_choices] if self.echoes else Echo("")
        text = "".join(piece.piece.text for piece in pieces)
        logprobs: dict[str, Any] | None = None
        if self.num_logprobs >= 0:
            entries = (entry for piece in pieces for entry in piece.piece.entries)
            logprobs = self.logprobs([_moved(entry, len(echo.text)) for entry in entries])
            if with_echo and echo.logprobs is not None:
                logprobs = {name: _joined(echo.logprobs[name], own) for name, own in logprobs.items()}
        ids = self._ids([entry.token for piece in pieces for entry in piece.piece.entries])
        of_prompt = self.prompts[index // self.num_choices] if with_echo and self.prompts else {}
        shown = echo.text + text if with_echo else text
        return {"index": index, "text": shown, "logprobs": logprobs} | ids | of_prompt

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": ids} if self.with_ids else {}

    def logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, list[Any]]:
        """Returns four arrays of one length. A token without a logprob is the first of a prompt."""
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [finite(entry.logprob.logprob) if entry.logprob else None for entry in entries],
            "top_logprobs": [self._top(entry.token, entry.logprob) if entry.logprob else None for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, token: int, logprob: TokenLogprob) -> dict[str, float | None]:
        """Returns the best tokens and the token itself, which need not be one of them. Of two tokens with one text the
        better one counts.
        """
        top = {self._name(other.token): finite(other.logprob) for other in reversed(logprob.top)}
        top = dict(reversed(top.items()))
        top.setdefault(self._name(token), finite(logprob.logprob))
        return top

    def _name(self, token: int) -> str:
        return id_name(token) if self.names_ids else self.tokenizer.token_text(token)


class EchoArrays:
    """The four arrays of a long prompt, encoded part by part: no part holds the interpreter's lock for long."""

    def __init__(self, form: CompletionForm) -> None:
        self._form = form
        self._parts: dict[str, list[bytes]] = {}

    def add(self, entries: Sequence[TokenEntry]) -> None:
        for name, values in self._form.logprobs(entries).items():
            self._parts.setdefault(name, []).append(msgspec.json.encode(values)[1:-1])

    def encoded(self) -> dict[str, bytes]:
        return {name: b"[" + b",".join(parts) + b"]" for name, parts in self._parts.items()}


def _joined(array: bytes, more: list[Any]) -> msgspec.Raw:
    return msgspec.Raw(array[:-1] + b"," + msgspec.json.encode(more)[1:] if more else array)


def _moved(entry: TokenEntry, by: int) -> TokenEntry:
    return TokenEntry(entry.token, entry.logprob, entry.offset + by)
