"""The writer of Anthropic's Messages: one message as a body, or as events that build the same message. The module is
pure.

`Blocks` turns parts into events and keeps the blocks that these events build, so a body and a stream cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from accounting.values.types import Usage
from gateway.base import ids
from gateway.base.errors import ApiError
from gateway.generation.generation import ChoicePiece
from gateway.generation.stream import Numbered
from gateway.generation.writer import Ending
from gateway.http.dialects import anthropic_error
from gateway.http.sse import MESSAGES
from gateway.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text
from gateway.writers.partial_json import complete_prefix
from gateway.writers.signatures import signature_of


@dataclass
class _Block:
    """One block of content while it grows."""

    start: dict[str, Any]
    is_shown: bool = True
    """Whether the client gets the text. A thought may be left out; its signature is there all the same."""
    pieces: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.start["type"])

    def built(self) -> dict[str, Any]:
        """Returns the block that a client has after all its events."""
        text = "".join(self.pieces)
        if self.kind == "thinking":
            return self.start | {"thinking": text if self.is_shown else "", "signature": self.signature()}
        return self.start | ({"input": complete_prefix(text)} if self.kind == "tool_use" else {"text": text})

    def signature(self) -> str:
        return signature_of("".join(self.pieces), is_shown=self.is_shown)


class Blocks:
    """The blocks of one message, from its parts."""

    def __init__(self, *, shows_thoughts: bool = True) -> None:
        self._shows_thoughts = shows_thoughts
        self._blocks: list[_Block] = []
        self._is_open = False

    def of(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Returns the events of further parts."""
        events: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Text(text):
                    events += self._within({"type": "text", "text": ""})
                    events.append(self._grown(text, {"type": "text_delta", "text": text}))
                case Reasoning(text):
                    events += self._within({"type": "thinking", "thinking": "", "signature": ""})
                    grown = self._grown(text, {"type": "thinking_delta", "thinking": text})
                    events += [grown] if self._shows_thoughts else []
                case CallBegin(_, id, name):
                    events += self._begun({"type": "tool_use", "id": tool_use_id(id), "name": name, "input": {}})
                case CallArguments(_, text):
                    events.append(self._grown(text, {"type": "input_json_delta", "partial_json": text}))
        return events

    def end(self) -> list[dict[str, Any]]:
        """Returns the events that end the open block."""
        if not self._is_open:
            return []
        self._is_open = False
        block = self._blocks[-1]
        events: list[dict[str, Any]] = []
        if block.kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": block.signature()}))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def content(self) -> list[dict[str, Any]]:
        """Returns the blocks so far, as a body has them."""
        return [block.built() for block in self._blocks]

    def _within(self, start: dict[str, Any]) -> list[dict[str, Any]]:
        """Goes on with the open block if it is of this kind, or begins one."""
        if self._is_open and self._blocks[-1].kind == start["type"]:
            return []
        return self._begun(start)

    def _begun(self, start: dict[str, Any]) -> list[dict[str, Any]]:
        ended = self.end()
        self._blocks.append(_Block(start, self._shows_thoughts))
        self._is_open = True
        return [*ended, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": start}]

    def _grown(self, text: str, delta: dict[str, Any]) -> dict[str, Any]:
        self._blocks[-1].pieces.append(text)
        return self._delta(delta)

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


class MessageWriter:
    """The writer (`gateway/generation/writer.py`) of one message. `prompt` is to be set before the first event."""

    style = MESSAGES

    def __init__(self, model: str, tier: str, *, fills_context: bool = False, shows_thoughts: bool = True) -> None:
        """Takes the model's name as it was asked for. If `fills_context`, an output that ends at its bound has reached
        the end of the context, and not `max_tokens`; it may be set until the closing. Unless it `shows_thoughts`, their
        text is in the signatures alone.
        """
        self._model = model
        self._tier = "batch" if tier == "batch" else "standard"
        self._id = ids.object_id("msg_")
        self._blocks = Blocks(shows_thoughts=shows_thoughts)
        self._stop: dict[str, Any] = {}
        self.fills_context = fills_context
        self.prompt = Usage()

    def opening(self, root: str) -> list[Any]:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, self._usage(self.prompt, 0))
        return [{"type": "message_start", "message": message}, MESSAGES.ping]

    def of(self, found: Sequence[Numbered]) -> list[Any]:
        return self._events(numbered.piece for numbered in found)

    def closing(self, ending: Ending) -> list[Any]:
        usage = self._usage(ending.usage, ending.num_reasoning)
        return [
            {"type": "message_delta", "delta": self._told(ending), "usage": usage},
            {"type": "message_stop", "headgate": ending.headgate},
        ]

    def choice(self, index: int, pieces: Sequence[ChoicePiece]) -> Any:
        self._events(pieces)
        return self._blocks.content()

    def whole(self, root: str, choices: Sequence[Any], ending: Ending) -> Any:
        usage = self._usage(ending.usage, ending.num_reasoning)
        return self._message(choices[0], self._told(ending), usage) | {"headgate": ending.headgate}

    def failed(self, error: ApiError, request_id: str) -> list[Any]:
        return [anthropic_error(error, request_id)]

    def _events(self, pieces: Iterable[ChoicePiece]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for piece in pieces:
            events += self._blocks.of(piece.parts)
            if piece.finish is not None:
                events += self._blocks.end()
                self._stop = self._stopped(piece)
        return events

    def _stopped(self, piece: ChoicePiece) -> dict[str, Any]:
        stop = piece.stop_reason if isinstance(piece.stop_reason, str) else None
        if piece.finish == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if piece.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if piece.finish == "content_filter":
            return {"stop_reason": "refusal", "stop_sequence": None}
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}

    def _told(self, ending: Ending) -> dict[str, Any]:
        """Returns why it stopped, once it is known whether a budget ended it."""
        if not self.fills_context or self._stop.get("stop_reason") != "max_tokens" or ending.headgate.get("stop"):
            return self._stop
        return self._stop | {"stop_reason": "model_context_window_exceeded"}

    def _message(self, content: list[Any], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop,
            "usage": usage,
        }

    def _usage(self, usage: Usage, num_reasoning: int) -> dict[str, Any]:
        """Returns the usage in Anthropic's shape: the three counts of the prompt are disjoint and add up to it."""
        return {
            "input_tokens": usage.uncached,
            "cache_creation_input_tokens": usage.cache_write,
            "cache_read_input_tokens": usage.cache_read,
            "cache_creation": {"ephemeral_5m_input_tokens": usage.cache_write, "ephemeral_1h_input_tokens": 0},
            "output_tokens": usage.output,
            "output_tokens_details": {"thinking_tokens": num_reasoning},
            "service_tier": self._tier,
        }


def tool_use_id(call_id: str) -> str:
    """Returns the id of a call as Anthropic's API writes it."""
    return f"toolu_{call_id.removeprefix('call_')}"
