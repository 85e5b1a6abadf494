"""The body of `POST /v1/responses`: fields, ranges, and the fields that cannot be honoured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.base import errors
from gateway.schema.convert import convert
from gateway.schema.parameters import MAX_IGNORED_NAMES, check_others, unknown_inside
from gateway.schema.sampling import Bound

MAX_ITEMS = 10_000
"""The most input items. No context holds as many turns."""
INCLUDABLE = frozenset(
    {
        "reasoning.encrypted_content",
        "message.output_text.logprobs",
        "message.input_image.image_url",
        "web_search_call.results",
        "web_search_call.action.sources",
        "file_search_call.results",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""The names that `include` may have. All but the first two belong to tools and parts that are refused, so they add
nothing.
"""
ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
SUMMARIES = ("auto", "concise", "detailed")

UNSUPPORTED = {
    "conversation": "Use 'previous_response_id', or send the items yourself.",
    "prompt": "Prompt templates are not offered: send 'instructions' and 'input'.",
    "context_management": "Use POST /v1/responses/compact, or send fewer items.",
    "moderation": "",
    "enable_response_messages": "Use /tokenize to see the prompt.",
    "previous_input_messages": "Send the items as 'input'.",
    "image": "Only text is served.",
    "access_programs": "",
    "personality": "",
    "background_options": "A background response runs as soon as possible.",
    "messages": "Use 'input' instead.",
    "max_tokens": "Use 'max_output_tokens' instead.",
    "max_completion_tokens": "Use 'max_output_tokens' instead.",
    "response_format": "Use 'text.format' instead.",
    "reasoning_effort": "Use 'reasoning.effort' instead.",
    "functions": "Use 'tools' instead.",
    "function_call": "Use 'tool_choice' instead.",
    "logprobs": "Use 'include': [\"message.output_text.logprobs\"] instead.",
    "n": "A response has one answer.",
    "best_of": "A response has one answer.",
    "use_beam_search": "A response has one answer.",
    "suffix": "",
    "echo": "",
    "prompt_logprobs": "",
    "logits_processors": "Use 'logit_bias' instead.",
    "chat_template": "The model's own template is used.",
}
PASSED_ON = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "ignore_eos",
        "min_tokens",
        "bad_words",
        "allowed_token_ids",
        "structured_outputs",
        "cache_salt",
        "service_tier",
        "metadata",
        "prompt_cache_key",
        "user",
        "safety_identifier",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "enable_thinking",
        "thinking_token_budget",
    }
)
"""The fields that mean the same in chat. Chat checks them."""


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None
    """This field has no effect: nothing is added to hide lengths."""


class CacheOptions(msgspec.Struct, frozen=True):
    """These fields have no effect: the retention depends on tier and key."""

    mode: Any = None
    ttl: Any = None
    comparison_response_id: Any = None


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str | Annotated[list[Any], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    max_output_tokens: Bound | None = None
    max_tool_calls: Bound | None = None
    """This field bounds tools that a server runs by itself. Headgate runs none."""
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    @property
    def items(self) -> list[Any]:
        """The input as items; a text is one message of the user's."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())


PARTS: Mapping[str, type[msgspec.Struct]] = {
    "reasoning": Reasoning,
    "text": TextOptions,
    "stream_options": ResponseStreamOptions,
    "prompt_cache_options": CacheOptions,
}
UNSUPPORTED_INSIDE = {
    "prompt_cache_options.prewarm": "Every request generates a response, and leaves its prompt in the cache.",
    "reasoning.max_tokens": "Use 'thinking_token_budget' instead.",
    "reasoning.exclude": "The reasoning is an item of its own, which a client may leave out.",
    "reasoning.enabled": "Use 'reasoning.effort' instead.",
}
HONOURED = frozenset(ResponseFields.__struct_fields__) | PASSED_ON


def read(value: Mapping[str, Any]) -> tuple[ResponseFields, list[str]]:
    """Reads a body. Returns (the request, names of ignored fields). Raises `ApiError` 400."""
    ignored = check_others(value, HONOURED | _switched_off(value), UNSUPPORTED, generates=True)
    ignored += unknown_inside(value, PARTS, UNSUPPORTED_INSIDE)
    fields = convert(value, ResponseFields)
    _check(fields)
    return fields, ignored[:MAX_IGNORED_NAMES]


def _switched_off(value: Mapping[str, Any]) -> frozenset[str]:
    """Returns the unsupported fields that ask for nothing, such as `false`, an empty list, or one answer."""
    empty: Sequence[Any] = (False, [], {}, "")
    off = {name for name in UNSUPPORTED if name in value and any(value[name] is e or value[name] == e for e in empty)}
    return frozenset(off | {name for name in ("n", "best_of") if value.get(name) == 1})


def _check(fields: ResponseFields) -> None:
    """Checks rules that types cannot express. Raises `ApiError` 400."""
    for index, name in enumerate(fields.include or ()):
        if name not in INCLUDABLE:
            raise errors.invalid(f"Only {', '.join(sorted(INCLUDABLE))} can be included.", f"include[{index}]")
    if fields.truncation not in (None, "disabled"):
        code = "unsupported_parameter" if fields.truncation == "auto" else "invalid_value"
        message = "Only 'disabled' is offered: no item is ever left out of a prompt. Use POST /v1/responses/compact."
        raise errors.invalid(message, "truncation", code)
    if fields.stream_options is not None and not fields.stream:
        raise errors.invalid("'stream_options' needs 'stream': true.", "stream_options")
    if fields.background and fields.store is False:
        raise errors.invalid("'background' needs a response that is stored.", "background")
    if fields.reasoning is not None:
        _check_reasoning(fields.reasoning)
    if fields.text is not None and fields.text.verbosity not in (None, "low", "medium", "high"):
        raise errors.invalid("The verbosity must be 'low', 'medium' or 'high'.", "text.verbosity")


def _check_reasoning(reasoning: Reasoning) -> None:
    for name, value in (("summary", reasoning.summary), ("generate_summary", reasoning.generate_summary)):
        if value is not None and value not in SUMMARIES:
            raise errors.invalid(f"It must be one of {', '.join(SUMMARIES)}.", f"reasoning.{name}")
    if reasoning.context not in (None, "auto"):
        message = "Only 'auto' is offered: the model's template says which reasoning a later turn sees."
        raise errors.invalid(message, "reasoning.context", "unsupported_parameter")
    if reasoning.mode not in (None, "standard"):
        raise errors.invalid("Only 'standard' is offered.", "reasoning.mode", "unsupported_parameter")
