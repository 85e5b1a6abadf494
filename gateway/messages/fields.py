"""The fields of `POST /v1/messages` and `/v1/messages/count_tokens`: names, types, ranges, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.base import errors
from gateway.schema import parameters
from gateway.schema.convert import convert
from gateway.schema.sampling import INT64, Bound

MAX_IGNORED_NAMES = 10

Text = Annotated[str, Meta(min_length=1)]


class Metadata(msgspec.Struct, frozen=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: Bound | None = None
    display: str | None = None

    @property
    def shows_thoughts(self) -> bool:
        """Whether the answer has the text of thoughts. `updates` shows notes of progress alone, and none are written."""
        return self.display in (None, "summarized")


class ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class ContextManagement(msgspec.Struct, frozen=True):
    edits: list[dict[str, Any]] | None = None


class CountFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that make the prompt."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: Any = None


class MessagesFields(CountFields, frozen=True, kw_only=True):
    max_tokens: Bound
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    speed: str | None = None
    seed: Annotated[int, Meta(ge=-INT64, le=INT64 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


UNSUPPORTED: Mapping[str, str] = {
    "container": "Nothing is executed on this server.",
    "mcp_servers": "Call the servers from your own program, and give their tools as 'tools'.",
    "inference_geo": "The operator of this server decides where it runs.",
    "compaction": "Shorten the conversation in your own program.",
    "fallbacks": "Send the request again with another model.",
    "thread": "Send the whole conversation as 'messages'.",
    "diagnostics": "The 'headgate' object of the answer says what became of the cache.",
    "fallback_credit_token": "Send the request again with another model.",
}
PARTS: Mapping[str, type[msgspec.Struct]] = {
    "metadata": Metadata,
    "thinking": Thinking,
    "tool_choice": ToolChoice,
    "output_config": OutputConfig,
    "output_format": OutputFormat,
    "context_management": ContextManagement,
}
UNSUPPORTED_INSIDE: Mapping[str, str] = {
    "output_config.task_budget": "Use 'max_tokens', and 'thinking.budget_tokens' for the thinking."
}
OF_CHAT = parameters.names_of("chat")
"""Fields of the chat API: whoever sends one here expects an effect that it would not have."""


def read(value: Mapping[str, Any]) -> tuple[MessagesFields, list[str]]:
    """Reads the body of a message. Returns (its fields, the names of ignored fields). Raises `ApiError` 400."""
    if value.get("max_tokens") == 0 and value["max_tokens"] is not False:
        message = "'max_tokens' must be at least 1: a request with no answer, which fills the cache, is not offered."
        raise errors.invalid(message, "max_tokens", "unsupported_parameter")
    fields = convert(value, MessagesFields)
    ignored = _check_others(value, MessagesFields.__struct_fields__)
    if fields.service_tier not in {None, "auto", "standard_only"}:
        raise errors.invalid("'service_tier' must be 'auto' or 'standard_only'.", "service_tier")
    ignored = (ignored + parameters.unknown_inside(value, PARTS, UNSUPPORTED_INSIDE))[:MAX_IGNORED_NAMES]
    if fields.speed not in {None, "standard"}:
        raise errors.invalid("'speed' must be 'standard': there is one speed.", "speed", "unsupported_parameter")
    return fields, ignored


def read_count(value: Mapping[str, Any]) -> CountFields:
    """Reads the body of a count. Fields that do not change the prompt are ignored. Raises `ApiError` 400."""
    fields = convert(value, CountFields)
    _check_others(value, MessagesFields.__struct_fields__)
    parameters.unknown_inside(value, PARTS, UNSUPPORTED_INSIDE)
    return fields


def _check_others(value: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    """Refuses fields that would change the answer, and returns the names of unknown ones."""
    ignored: list[str] = []
    for name, item in value.items():
        if name in known or item in (None, False, "", [], {}):
            continue
        if name in UNSUPPORTED:
            raise errors.invalid(
                f"The parameter '{name}' is not supported. {UNSUPPORTED[name]}", name, "unsupported_parameter"
            )
        if name in OF_CHAT:
            raise errors.invalid(
                f"'{name}' is a field of /v1/chat/completions, and /v1/messages has no such field.",
                name,
                "unsupported_parameter",
            )
        if len(name) <= 64 and name.isascii() and name.isidentifier():
            ignored.append(name)
    return ignored[:MAX_IGNORED_NAMES]
