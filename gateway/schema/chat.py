"""The body of `POST /v1/chat/completions`: fields, ranges, and the messages as a template may see them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.base import errors
from gateway.schema import parameters
from gateway.schema.convert import convert, refuse_deep
from gateway.schema.custom_tools import Name, arguments_of
from gateway.schema.sampling import Bound, SamplingFields, check_shared
from gateway.schema.search import check_search

MAX_MESSAGES = 10_000
"""The most messages: a template visits each, and no context holds this many turns."""
ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatFields(SamplingFields, frozen=True, kw_only=True):
    messages: list[Any]
    max_completion_tokens: Bound | None = None
    max_tokens: Bound | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    reasoning_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Another name of `thinking_token_budget`."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None

    @property
    def max_output(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def ends_open(self) -> bool:
        """Whether the prompt ends where the assistant's answer begins."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def num_logprobs(self) -> int:
        """The number of logprobs as the engine wants it: -1 for none."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class Function(msgspec.Struct, frozen=True):
    name: Name
    arguments: str


class CustomCall(msgspec.Struct, frozen=True):
    name: Name
    input: str


class ToolCall(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(min_length=1, max_length=256)]
    function: Function | None = None
    type: str = "function"
    custom: CustomCall | None = None

    def as_function(self, where: str) -> Function:
        """Returns the call as the model wrote it: a custom tool is a function for it. Raises `ApiError` 400."""
        if self.type == "custom" and self.custom is not None:
            return Function(self.custom.name, arguments_of(self.custom.input))
        if self.function is None or self.type == "custom":
            param = f"{where}.{'custom' if self.type == 'custom' else 'function'}"
            raise errors.invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
        return self.function


@dataclass(frozen=True)
class TurnForm:
    """The form in which a template wants tool calls in messages."""

    as_objects: bool = False
    """Whether arguments are objects; otherwise they are JSON texts."""
    null_content: bool = False
    """Whether a call without a text has the content null; otherwise it is empty."""
    has_short_ids: bool = False
    """Whether ids of calls must have nine letters and digits."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Any] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def read(value: dict[str, Any]) -> tuple[ChatFields, list[str]]:
    """Reads a body. Returns (the request, names of ignored fields). Raises `ApiError` 400."""
    fields, ignored = parameters.read(value, ChatFields, "chat")
    refuse_deep(value.get("messages"), frozenset({"chat_template", "chat_template_kwargs"}), "messages")
    check_shared(fields)
    check_search(fields)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise errors.invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    if fields.logprob_token_ids and not fields.logprobs:
        raise errors.invalid("'logprob_token_ids' needs 'logprobs': true.", "logprob_token_ids")
    check_continuation(fields.continue_final_message, fields.add_generation_prompt, fields.messages)
    _refuse_unserved(fields)
    return fields, ignored


def check_continuation(continues: bool | None, adds_prompt: bool | None, messages: list[Any]) -> None:
    """Checks that the last message can be continued, if it is to be. Raises `ApiError` 400."""
    if not continues:
        return
    if adds_prompt:
        raise errors.invalid("This cannot be combined with 'add_generation_prompt': true.", "continue_final_message")
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or last.get("tool_calls"):
        raise errors.invalid("The last message must be the assistant's, without tool calls.", "continue_final_message")


def _refuse_unserved(fields: ChatFields) -> None:
    """Refuses fields that would change the output and cannot be honoured yet."""
    if fields.best_of is not None and not fields.use_beam_search:
        raise _unsupported("best_of", "Use 'n' instead.")
    if fields.tools and fields.use_beam_search:
        raise errors.invalid("'tools' cannot be combined with 'use_beam_search'.", "tools")
    if fields.modalities not in (None, [], ["text"]):
        raise _unsupported("modalities", "Only text is served.")


def _unsupported(name: str, hint: str) -> errors.ApiError:
    return errors.invalid(f"The parameter '{name}' is not supported. {hint}", name, "unsupported_parameter")


def template_messages(
    messages: list[Any], break_up: Callable[[str, bool], str], form: TurnForm = TurnForm()
) -> list[dict[str, Any]]:
    """Returns checked messages as plain values for the template: known fields only, with each string of the client's
    passed through `break_up` (the text, and whether it stands in an assistant message). Raises `ApiError` 400.
    """
    if not messages:
        raise errors.invalid("'messages' must not be empty.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise errors.invalid(f"At most {MAX_MESSAGES:,} messages are allowed.", "messages")
    return [_message(f"messages[{i}]", message, break_up, form) for i, message in enumerate(messages)]


def echoed(messages: list[Any]) -> str:
    """Returns the text of the last of checked messages if it is the assistant's, otherwise no text."""
    content = messages[-1].get("content") if messages[-1].get("role") == "assistant" else None
    if isinstance(content, list):
        return "".join(_part("messages", part) for part in content)
    return content or ""


def _message(where: str, value: Any, break_up: Callable[[str, bool], str], form: TurnForm) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise errors.invalid("A message must be an object.", where, "invalid_type")
    if value.get("function_call") is not None:
        raise errors.invalid("Use 'tool_calls' instead.", f"{where}.function_call", "unsupported_parameter")
    message = convert(value, Message, where)
    if message.role not in ROLES:
        raise errors.invalid("This role is unknown.", f"{where}.role")
    own = message.role == "assistant"
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(f"{where}.content", message, lambda text: break_up(text, own)),
    }
    if message.name is not None:
        plain["name"] = break_up(message.name, False)
    if message.role == "tool":
        if message.tool_call_id is None:
            raise errors.invalid(
                f"Missing required parameter: '{where}.tool_call_id'.",
                f"{where}.tool_call_id",
                "missing_required_parameter",
            )
        plain["tool_call_id"] = break_up(_id(message.tool_call_id, form), False)
    if message.tool_calls and not own:
        raise errors.invalid("Only an assistant message has tool calls.", f"{where}.tool_calls")
    return plain | _own(where, message, plain["content"], break_up, form) if own else plain


def _own(
    where: str, message: Message, content: str, break_up: Callable[[str, bool], str], form: TurnForm
) -> dict[str, Any]:
    """Returns the calls and the reasoning of an assistant message."""
    found: dict[str, Any] = {}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", call, break_up, form) for i, call in calls]
        found["content"] = content or (None if form.null_content else "")
    if thought := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = break_up(thought, False)
        if not content:
            found["thinking"] = found["reasoning_content"]  # the name in gpt-oss's template
    return found


def _content(where: str, message: Message, break_up: Callable[[str], str]) -> str:
    """Joins text parts into one text: a template sees a string, in whichever form it was sent."""
    content = message.content
    if isinstance(content, list):
        return "".join(break_up(_part(f"{where}[{i}]", part)) for i, part in enumerate(content))
    if content is None and message.role in {"system", "developer", "user"}:
        raise errors.invalid(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")
    return break_up(content or "")


_KINDS = {
    "image_url": "an image",
    "image": "an image",
    "input_image": "an image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "a video",
    "file": "a file",
}
"""Parts that are not text, and how a refusal names them."""


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise errors.invalid("A content part must be an object.", where, "invalid_type")
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if isinstance(kind, str) and kind in _KINDS:
        what = _KINDS[kind]
        raise errors.invalid(
            f"This model reads text only, so {what} cannot be part of a message.", where, "unsupported_parameter"
        )
    if kind == "text":
        raise errors.invalid("A text part needs 'text'.", f"{where}.text", "invalid_type")
    raise errors.invalid("This type of content part is unknown.", f"{where}.type")


def _tool_call(where: str, call: ToolCall, break_up: Callable[[str, bool], str], form: TurnForm) -> dict[str, Any]:
    called = call.as_function(where)
    arguments = _object(called.arguments) if form.as_objects else None
    function = {
        "name": called.name,
        "arguments": break_up(called.arguments, False) if arguments is None else broken_up(arguments, break_up),
    }
    return {"id": break_up(_id(call.id, form), False), "type": "function", "function": function}


def _object(arguments: str) -> dict[str, Any] | None:
    """Returns the arguments as an object; None for a text that holds none, which a model may have written."""
    try:
        value = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def broken_up(value: Any, break_up: Callable[[str, bool], str]) -> Any:
    """Returns a JSON value in which every string went through `break_up`, names of members too."""
    if isinstance(value, str):
        return break_up(value, False)
    if isinstance(value, dict):
        return {break_up(name, False): broken_up(item, break_up) for name, item in value.items()}
    if isinstance(value, list):
        return [broken_up(item, break_up) for item in value]
    return value


def _id(given: str, form: TurnForm) -> str:
    return hashlib.blake2b(given.encode(), digest_size=5).hexdigest()[:9] if form.has_short_ids else given
