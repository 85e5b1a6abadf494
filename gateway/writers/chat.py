"""A choice of chat: messages, deltas with tool calls and reasoning, and logprobs. The module is pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.generation.generation import ChoicePiece
from gateway.parsers.parts import CallArguments, CallBegin, Folded, Part, Reasoning, Text
from gateway.text.choice import TokenEntry
from gateway.text.tokenizer import ModelTokenizer
from gateway.writers.chunks import finish_of, finite, id_name, tokens_of


class ChatForm(msgspec.Struct, frozen=True):
    tokenizer: ModelTokenizer
    with_logprobs: bool
    with_reasoning: bool = True
    is_named: bool = False
    """Whether the client named the function to call: the finish is then `stop`, as OpenAI has it."""
    with_ids: bool = False
    """Choices and chunks have the ids of their tokens."""
    names_ids: bool = False
    """Logprobs name tokens by their ids."""
    echo: str = ""
    """Text in front of each choice."""
    body_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    id_prefix: str = "chatcmpl-"

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": self.echo}, None) | self._ids(())

    def parts(self, index: int, piece: ChoicePiece) -> list[dict[str, Any]]:
        """Returns a chunk for each part of the piece. The first has the logprobs of the whole piece."""
        deltas = [_delta(part) for part in piece.parts if self.with_reasoning or not isinstance(part, Reasoning)]
        if not deltas and piece.piece.entries:
            deltas.append({"content": ""})
        found = []
        for place, delta in enumerate(deltas):
            own = [] if place else [piece]
            ids = [entry.token for one in own for entry in one.piece.entries]
            found.append(self._chunk(index, delta, self._logprobs(own)) | self._ids(ids))
        return found

    def plain(self, piece: ChoicePiece) -> str | None:
        if self.with_logprobs or self.with_ids or len(piece.parts) != 1:
            return None
        part = piece.parts[0]
        return part.text if isinstance(part, Text) else None

    def closing(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        return self._chunk(index, {}, None) | self._finish(piece) | self._ids(piece.piece.unshown)

    def whole(self, index: int, pieces: Sequence[ChoicePiece]) -> msgspec.Raw:
        """Returns JSON, because a choice with logprobs may have megabytes."""
        message = Folded.of(part for piece in pieces for part in piece.parts)
        answer = _message(message, self.with_reasoning, self.echo)
        choice = {"index": index, "message": answer, "logprobs": self._logprobs(pieces)}
        return msgspec.Raw(msgspec.json.encode(choice | self._finish(pieces[-1]) | self._ids(tokens_of(pieces))))

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": ids} if self.with_ids else {}

    def _finish(self, piece: ChoicePiece) -> dict[str, Any]:
        finish = finish_of(piece)
        return finish | {"finish_reason": "stop"} if self.is_named and piece.finish == "tool_calls" else finish

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, pieces: Sequence[ChoicePiece]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        entries = [entry for piece in pieces for entry in piece.piece.entries]
        return {"content": [logprobs_of(self.tokenizer, entry, self.names_ids) for entry in entries], "refusal": None}


def logprobs_of(tokenizer: ModelTokenizer, entry: TokenEntry, names_ids: bool = False) -> dict[str, Any]:
    """Returns a token with its logprob and those of its alternatives. `names_ids` writes ids in place of texts."""
    top = entry.logprob.top if entry.logprob else ()
    return _token(tokenizer, entry.token, entry.logprob.logprob if entry.logprob else None, names_ids) | {
        "top_logprobs": [_token(tokenizer, other.token, other.logprob, names_ids) for other in top]
    }


def _token(tokenizer: ModelTokenizer, token: int, logprob: float | None, names_ids: bool) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    name = id_name(token) if names_ids else data.decode(errors="replace")
    return {"token": name, "logprob": finite(logprob), "bytes": list(data)}


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegin(index):
            return {"tool_calls": [{"index": index, **_call(part, "")}]}
        case CallArguments(index, text, is_custom=True):
            return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _call(begin: CallBegin, arguments: str) -> dict[str, Any]:
    if begin.is_custom:
        return {"id": begin.id, "type": "custom", "custom": {"name": begin.name, "input": arguments}}
    return {"id": begin.id, "type": "function", "function": {"name": begin.name, "arguments": arguments}}


def _message(folded: Folded, with_reasoning: bool, echo: str) -> dict[str, Any]:
    calls = [_call(begin, arguments) for begin, arguments in folded.calls]
    message: dict[str, Any] = {"role": "assistant", "content": echo + folded.text, "refusal": None}
    if calls:
        message |= {"content": echo + folded.text or None, "tool_calls": calls}
    if folded.reasoning and with_reasoning:
        message |= {"reasoning_content": folded.reasoning, "reasoning": folded.reasoning}
    return message
