"""The answers to clients: bodies and chunks of chat and completions, as plain values. Pure.

Both shapes are made from the same pieces, so a stream and a body cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from accounting.values.types import Usage
from gateway.generation.generation import ChoicePiece
from gateway.limiter.limit_replies import scope_of
from gateway.limiter.rules import BudgetUse
from gateway.metering.admission import Settled
from gateway.text.choice import TokenEntry
from gateway.text.tokenizer import ModelTokenizer
from workers.protocol.messages import CacheReport, Failed, Finished, TimelineEvent, TokenLogprob

LOGPROB_FLOOR = -9999.0


class Shape(Protocol):
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

    def part(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        """Returns the choice in a chunk with text."""
        ...

    def closing(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        """Returns the choice in its last chunk."""
        ...

    def whole(self, index: int, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        """Returns the choice in a body."""
        ...


@dataclass(frozen=True)
class ChatShape:
    tokenizer: ModelTokenizer
    with_logprobs: bool
    body_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    id_prefix: str = "chatcmpl-"

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def part(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        return self._chunk(index, {"content": piece.piece.text}, self._logprobs([piece]))

    def closing(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        return self._chunk(index, {}, None) | _finish(piece)

    def whole(self, index: int, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        text = "".join(piece.piece.text for piece in pieces)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(pieces),
        } | _finish(pieces[-1])

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, pieces: Sequence[ChoicePiece]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        entries = [entry for piece in pieces for entry in piece.piece.entries]
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        top = entry.logprob.top if entry.logprob else ()
        return self._token(entry.token, entry.logprob.logprob if entry.logprob else None) | {
            "top_logprobs": [self._token(other.token, other.logprob) for other in top]
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


@dataclass(frozen=True)
class Echo:
    """One prompt as it is written in front of its completions."""

    text: str
    logprobs: dict[str, bytes] | None = None
    """The prompt's logprobs in the form that clients see: four JSON arrays (`EchoArrays`)."""


@dataclass
class CompletionShape:
    tokenizer: ModelTokenizer
    num_logprobs: int
    echoes: Sequence[Echo] = ()
    """One echo per prompt, filled in once the engine has scored the prompt."""
    num_choices: int = 1
    body_object: str = "text_completion"
    chunk_object: str = "text_completion"
    id_prefix: str = "cmpl-"
    _echoed: set[int] = field(default_factory=set)

    def opening(self, index: int) -> None:
        return None

    def part(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        return self._choice(index, [piece], with_echo=self._first_of(index)) | {"finish_reason": None}

    def closing(self, index: int, piece: ChoicePiece) -> dict[str, Any]:
        """The last chunk has the echo alone, if there was no other text."""
        return self._choice(index, [], with_echo=self._first_of(index)) | _finish(piece)

    def whole(self, index: int, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        return self._choice(index, pieces, with_echo=True) | _finish(pieces[-1])

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
        return {"index": index, "text": echo.text + text if with_echo else text, "logprobs": logprobs}

    def logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, list[Any]]:
        """Returns four arrays of one length. A token without a logprob is the first of a prompt."""
        return {
            "tokens": [self.tokenizer.token_text(entry.token) for entry in entries],
            "token_logprobs": [finite(entry.logprob.logprob) if entry.logprob else None for entry in entries],
            "top_logprobs": [self._top(entry.logprob) if entry.logprob else None for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, logprob: TokenLogprob) -> dict[str, float | None]:
        return {self.tokenizer.token_text(other.token): finite(other.logprob) for other in logprob.top}


class EchoArrays:
    """The four arrays of a long prompt, encoded part by part: no part holds the interpreter's lock for long."""

    def __init__(self, shape: CompletionShape) -> None:
        self._shape = shape
        self._parts: dict[str, list[bytes]] = {}

    def add(self, entries: Sequence[TokenEntry]) -> None:
        for name, values in self._shape.logprobs(entries).items():
            self._parts.setdefault(name, []).append(msgspec.json.encode(values)[1:-1])

    def encoded(self) -> dict[str, bytes]:
        return {name: b"[" + b",".join(parts) + b"]" for name, parts in self._parts.items()}


def _joined(array: bytes, more: list[Any]) -> msgspec.Raw:
    return msgspec.Raw(array[:-1] + b"," + msgspec.json.encode(more)[1:] if more else array)


def finite(logprob: float | None) -> float | None:
    """Replaces NaN and infinities, because JSON has neither."""
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) and logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


def _finish(piece: ChoicePiece) -> dict[str, Any]:
    return {"finish_reason": piece.finish, "stop_reason": piece.stop_reason}


def _moved(entry: TokenEntry, by: int) -> TokenEntry:
    return TokenEntry(entry.token, entry.logprob, entry.offset + by)


def usage_of(usage: Usage) -> dict[str, Any]:
    """Returns the usage in OpenAI's shape: the prompt includes cached tokens; details are present even
    if they are 0.
    """
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.cache_write},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def headgate_of(
    request_id: str, tier: str, settled: Sequence[Settled], final: Finished | Failed | None, stop: BudgetUse | None
) -> dict[str, Any]:
    """Returns the `headgate` object of api.md 4.2."""
    last = settled[-1]
    report = final.cache if isinstance(final, Finished) else CacheReport()
    return {
        "request_id": request_id,
        "tier": tier,
        "charge_micro_units": sum(one.charge_micro_units for one in settled),
        "currency": last.currency,
        "price_version": last.price_version,
        **_phases(final.timeline if final else ()),
        "num_resumes": 0,
        "cache": {
            "cached_tokens": report.cached_tokens,
            "public_tokens": report.public_tokens,
            "miss_reason": report.miss_reason or None,
            "diverged_at_token": _unless_negative(report.diverged_at_token),
            "evicted_age_s": None if report.evicted_age_ms < 0 else report.evicted_age_ms / 1000,
        },
        "stop": None if stop is None else "budget",
        **({"scope": None, "resets_at": None} if stop is None else scope_of(stop)),
    }


def _unless_negative(value: int) -> int | None:
    return None if value < 0 else value


def _phases(timeline: Sequence[TimelineEvent]) -> dict[str, int | None]:
    """Returns whole milliseconds between the worker's own timeline events."""
    at: dict[str, int] = {}
    for event in timeline:
        at.setdefault(event.name, event.offset_us)
    spans = (
        ("queue_ms", "queued", "matched"),
        ("prefill_ms", "matched", "first_token"),
        ("decode_ms", "first_token", "finished"),
    )
    return {name: (at[end] - at[start]) // 1000 if start in at and end in at else None for name, start, end in spans}
