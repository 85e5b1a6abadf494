"""Items of the Responses API become messages of chat. The module is pure.

Items are finer than messages: the reasoning, the text and the calls of one turn are an item each. Neighbouring items of
the assistant become one message, as the model once wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.base import errors

Unseal = Callable[[str], str]
"""Returns the text of an encrypted content. Raises ValueError if it was not made for this tenant."""

MAX_ID_CHARS = 1024
"""The longest id of an item. It is in no prompt, but it is stored and sent back."""
SUMMARY = "Summary of the conversation so far:\n"
NOT_TEXT = frozenset({"input_file", "input_audio", "input_video"})


@dataclass
class Conversation:
    """The messages so far. `paths` says of each message from which item it came, such as `input[3]`."""

    unseal: Unseal
    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    _called: set[str] = field(default_factory=set)
    """The ids of the calls so far."""
    _is_open: bool = False
    """The last message is the assistant's, and further items may belong to it."""

    def add_all(self, items: Sequence[Any], path: str) -> None:
        """Adds items. Raises `ApiError` 400 that names the item as `path[index]`."""
        for index, item in enumerate(items):
            self._add(item, f"{path}[{index}]")

    def add_instructions(self, text: str) -> None:
        self._begin("instructions", {"role": "system", "content": text})

    def _add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise errors.invalid("An item must be an object.", where, "invalid_type")
        if item.get("id") is not None:
            _name(item["id"], f"{where}.id")
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case "function_call":
                self._add_call(item, where)
            case "custom_tool_call":
                self._add_custom_call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, where)
            case "compaction":
                self._add_compaction(item, where)
            case None:
                raise _missing(f"{where}.type")
            case _:
                shown = f" '{kind}'" if isinstance(kind, str) and kind.isidentifier() and len(kind) <= 64 else ""
                message = f"Items of type{shown} are not supported: only message, reasoning, function_call, "
                message += "custom_tool_call, the outputs of both, compaction and item_reference are."
                raise errors.invalid(message, f"{where}.type", "unsupported_parameter")

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise errors.invalid("The role must be user, assistant, system or developer.", f"{where}.role")
        content = _content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._begin(where, {"role": role, "content": content})
        else:
            self._assistant(where, "content")["content"] = content

    def _add_reasoning(self, item: dict[str, Any], where: str) -> None:
        text = self._reasoning(item, where)
        if text:
            self._assistant(where, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def _reasoning(self, item: dict[str, Any], where: str) -> str:
        """Returns the reasoning as text; a summary is no reasoning, and so it is not used."""
        content = item.get("content")
        if content:
            return _texts(content, f"{where}.content", ("reasoning_text", "text"))
        return self._unsealed(item, where) if item.get("encrypted_content") else ""

    def _unsealed(self, item: dict[str, Any], where: str) -> str:
        where += ".encrypted_content"
        try:
            return self.unseal(_string(item.get("encrypted_content"), where))
        except ValueError:
            raise errors.invalid("The encrypted content was not made here for this project.", where) from None

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        self._add_call_of(item, where, {"type": "function", "function": self._named(item, where, "arguments")})

    def _add_custom_call(self, item: dict[str, Any], where: str) -> None:
        self._add_call_of(item, where, {"type": "custom", "custom": self._named(item, where, "input")})

    def _named(self, item: dict[str, Any], where: str, content: str) -> dict[str, str]:
        """Returns the name that the model knows, and what the tool was called with."""
        called = {name: _string(item.get(name), f"{where}.{name}") for name in ("name", content)}
        if item.get("namespace"):
            called["name"] = qualified(_string(item["namespace"], f"{where}.namespace"), called["name"])
        return called

    def _add_call_of(self, item: dict[str, Any], where: str, call: dict[str, Any]) -> None:
        call_id = _string(item.get("call_id"), f"{where}.call_id")
        self._called.add(call_id)
        self._assistant(where).setdefault("tool_calls", []).append({"id": call_id, **call})

    def _add_output(self, item: dict[str, Any], where: str) -> None:
        output = item.get("output")
        content = output if isinstance(output, str) else _content(output, f"{where}.output")
        call_id = _string(item.get("call_id"), f"{where}.call_id")
        if call_id not in self._called:
            raise errors.invalid("No call before this output has its call_id.", f"{where}.call_id")
        self._begin(where, {"role": "tool", "tool_call_id": call_id, "content": content})

    def _add_compaction(self, item: dict[str, Any], where: str) -> None:
        """Adds a summary as a turn of the assistant. The user's messages before it become one turn, because
        many templates take no two of one role in a row.
        """
        begin = len(self.messages)
        while begin and self.messages[begin - 1]["role"] == "user":
            begin -= 1
        turns = [_joined(message["content"]) for message in self.messages[begin:]]
        if turns:
            first = self.paths[begin]
            del self.messages[begin:], self.paths[begin:]
            self._begin(first, {"role": "user", "content": "\n\n".join(turns)})
        self._begin(where, {"role": "assistant", "content": SUMMARY + self._unsealed(item, where)})

    def _begin(self, where: str, message: dict[str, Any]) -> dict[str, Any]:
        self.messages.append(message)
        self.paths.append(where)
        self._is_open = message["role"] == "assistant"
        return message

    def _assistant(self, where: str, *not_yet: str) -> dict[str, Any]:
        """Returns the assistant's message that is being written, or a new one if it has one of these fields already."""
        if self._is_open and not any(name in self.messages[-1] for name in not_yet):
            return self.messages[-1]
        return self._begin(where, {"role": "assistant"})


def qualified(namespace: str, name: str) -> str:
    """Returns the name that the model sees of a function in a namespace."""
    return f"{namespace}__{name}"


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _content(value: Any, where: str) -> str | list[dict[str, str]]:
    """Returns a message's content in chat's form."""
    if isinstance(value, str):
        return value
    if value is None:
        raise _missing(where)
    if not isinstance(value, list):
        raise errors.invalid("The content must be a text or a list of parts.", where, "invalid_type")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(value)]


def _part(part: Any, where: str) -> dict[str, str]:
    if not isinstance(part, dict):
        raise errors.invalid("A content part must be an object.", where, "invalid_type")
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": _string(part.get("text"), f"{where}.text")}
    if kind == "refusal":
        return {"type": "text", "text": _string(part.get("refusal"), f"{where}.refusal")}
    if kind == "input_image":  # agents know by this form that a picture was refused, and not the conversation
        raise errors.invalid("The served models read text, and no pictures.", f"{where}.image_url")
    if kind in NOT_TEXT:
        raise errors.invalid("Only text parts are served.", where, "unsupported_parameter")
    raise errors.invalid("A part must be of type 'input_text' or 'output_text'.", f"{where}.type")


def _texts(value: Any, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(value, list):
        raise errors.invalid("The content must be a list of parts.", where, "invalid_type")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise errors.invalid(f"A part must be of type '{kinds[0]}'.", f"{where}[{index}]")
        texts.append(_string(part.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _string(value: Any, where: str) -> str:
    if value is None:
        raise _missing(where)
    if not isinstance(value, str):
        raise errors.invalid(f"Invalid value for '{where}': it must be a text.", where, "invalid_type")
    return value


def _name(value: Any, where: str) -> None:
    if len(_string(value, where)) > MAX_ID_CHARS:
        raise errors.invalid(f"Invalid value for '{where}': it must have at most {MAX_ID_CHARS} characters.", where)


def _missing(where: str) -> errors.ApiError:
    return errors.invalid(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
