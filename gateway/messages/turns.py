"""Turns of a Messages body become chat messages: text, calls, results of calls and thoughts. The module is pure.

A turn of one role that follows a turn of the same role goes on with it, as Anthropic defines it. Text blocks of a system
prompt or of a user are separate paragraphs; text blocks of an assistant stand directly after each other, because they
are pieces of what a model has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.base import errors
from gateway.base.errors import ApiError
from gateway.messages.cache_control import check_cache_control
from gateway.writers.signatures import thought_in

PARAGRAPH = "\n\n"
FAILED = "Error: "
"""The text in front of the result of a call that failed (`is_error`): a chat message has no field for it."""
MAX_TURNS = 10_000
NOT_TEXT = frozenset({"image", "document", "search_result", "container_upload"})
SERVER_SIDE = frozenset(
    {"server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use", "mcp_tool_result"}
)


@dataclass
class Turns:
    """Chat messages in the making, with the place in the caller's body that each was made of."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def text(self, role: str, text: str, where: str) -> None:
        """Adds a paragraph to the last message of this role, or a new message."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role:
            self._add({"role": role, "content": text}, where)
        elif text:
            last["content"] = PARAGRAPH.join(filter(None, (last["content"], text)))

    def result(self, call_id: str, text: str, where: str) -> None:
        self._add({"role": "tool", "tool_call_id": call_id, "content": text}, where)

    def assistant(self, where: str) -> dict[str, Any]:
        """Returns the assistant's message that goes on, or a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""}, where)
        return self.messages[-1]

    def _add(self, message: dict[str, Any], where: str) -> None:
        self.messages.append(message)
        self.origins.append(where)


def turns(system: str | Sequence[Any] | None, messages: Sequence[Any]) -> Turns:
    """Returns the chat messages. Raises `ApiError` 400."""
    if not messages:
        raise errors.invalid("'messages' must not be empty.", "messages")
    if len(messages) > MAX_TURNS:
        raise errors.invalid(f"'messages' has more than {MAX_TURNS:,} turns.", "messages")
    made = Turns()
    for text, where in _texts(system, "system") if system else ():
        made.text("system", text, where)
    for index, turn in enumerate(messages):
        _add_turn(made, turn, f"messages[{index}]")
    return made


def _add_turn(made: Turns, turn: Any, where: str) -> None:
    if not isinstance(turn, dict):
        raise errors.invalid(f"'{where}' must be an object.", where, "invalid_type")
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(content, str | list):
        raise _wrong_type(f"{where}.content", "a string or a list of blocks")
    if role == "user":
        _add_user(made, content, f"{where}.content")
    elif role == "assistant":
        _add_assistant(made, content, f"{where}.content")
    elif role == "system":
        for text, place in _texts(content, f"{where}.content"):
            made.text("system", text, place)
    else:
        raise errors.invalid(f"'{where}.role' must be 'user', 'assistant' or 'system'.", f"{where}.role")


def _add_user(made: Turns, content: str | list[Any], where: str) -> None:
    for block, place in _blocks(content, where):
        if block["type"] == "text":
            made.text("user", _text(block, place), place)
        elif block["type"] == "tool_result":
            made.result(_string(block, "tool_use_id", place), _result(block, place), place)
        else:
            raise _refused(block["type"], place, "'text' and 'tool_result'")


def _add_assistant(made: Turns, content: str | list[Any], where: str) -> None:
    message = made.assistant(where)
    for block, place in _blocks(content, where):
        if block["type"] == "text":
            message["content"] += _text(block, place)
        elif block["type"] == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _thought(block, place)
        elif block["type"] == "tool_use":
            message.setdefault("tool_calls", []).append(_call(block, place))
        elif block["type"] == "redacted_thinking":
            raise _unsupported(f"'{place}' is redacted thinking, which only its writer can read: leave it out.", place)
        else:
            raise _refused(block["type"], place, "'text', 'thinking' and 'tool_use'")


def _thought(block: Mapping[str, Any], where: str) -> str:
    """Returns the thought of a block, which its signature carries where the text was left out."""
    text, signature = _string(block, "thinking", where), block.get("signature")
    if text or not isinstance(signature, str):
        return text
    try:
        return thought_in(signature)
    except ValueError:
        message = f"'{where}.signature' is not as this server wrote it."
        raise errors.invalid(message, f"{where}.signature") from None


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise _wrong_type(f"{where}.input", "an object")
    function = {"name": _string(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str) -> str:
    text = PARAGRAPH.join(text for text, _ in _texts(block.get("content") or "", f"{where}.content") if text)
    is_error = block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise _wrong_type(f"{where}.is_error", "true or false")
    return FAILED + text if is_error else text


def _texts(content: Any, where: str) -> list[tuple[str, str]]:
    """Returns (text, its place) of a string or of blocks that must all be text."""
    found: list[tuple[str, str]] = []
    for block, place in _blocks(content, where):
        if block["type"] != "text":
            raise _refused(block["type"], place, "'text'")
        found.append((_text(block, place), place))
    return found


def _blocks(content: Any, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Returns (block, its place). A string is short for one block of text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise _wrong_type(where, "a string or a list of blocks")
    found: list[tuple[Mapping[str, Any], str]] = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _wrong_type(place, "an object with a 'type'")
        check_cache_control(block.get("cache_control"), place)
        found.append((block, place))
    return found


def _text(block: Mapping[str, Any], where: str) -> str:
    return _string(block, "text", where)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if value is None:
        raise errors.invalid(
            f"Missing required parameter: '{where}.{name}'.", f"{where}.{name}", "missing_required_parameter"
        )
    if not isinstance(value, str):
        raise _wrong_type(f"{where}.{name}", "a string")
    return value


def _refused(kind: str, where: str, allowed: str) -> ApiError:
    """Returns the error for a block that cannot stand here. Only known kinds are echoed: others are the client's text."""
    if kind in NOT_TEXT:
        return _unsupported(f"'{where}' is a block of type '{kind}', and this model reads text alone.", where)
    if kind in SERVER_SIDE:
        return _unsupported(f"'{where}' is a block of type '{kind}', and this server runs no tools.", where)
    return errors.invalid(f"'{where}.type' is not one of {allowed}.", f"{where}.type")


def _unsupported(message: str, where: str) -> ApiError:
    return errors.invalid(message, where, "unsupported_parameter")


def _wrong_type(where: str, wanted: str) -> ApiError:
    return errors.invalid(f"'{where}' must be {wanted}.", where, "invalid_type")
