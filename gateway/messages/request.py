"""A Messages body becomes a chat body (docs/messages.md has the table). Here the model is two facts of its template.

Chat then does all the rest, so limits, forms, tools, caches and metering are the same code for both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.base import errors
from gateway.messages.cache_control import check_cache_control
from gateway.messages.edits import clear_thoughts, kept_turns
from gateway.messages.fields import CountFields, MessagesFields, OutputConfig, OutputFormat, Thinking
from gateway.messages.tools import chat_choice, chat_tools
from gateway.messages.turns import turns
from gateway.schema.switches import THINKING

DEFAULT_EFFORT = "high"
"""The effort that is the same as none at all, by Anthropic's definition."""
_REFUSED: Mapping[str, tuple[frozenset[str], str]] = {
    "never": (frozenset({"enabled"}), "does not think"),
    "may": (frozenset(), ""),
    "always": (frozenset({"disabled"}), "always thinks"),
    "unknown": (frozenset({"enabled", "disabled"}), "thinks as its provider decides"),
}
"""The types of thinking that a model without a switch cannot have, and why, by `Reader.thinks`."""
_SESSION = re.compile(r"_session_(?P<session>[0-9A-Za-z-]{1,64})\Z")


@dataclass(frozen=True)
class Reader:
    """The model, as far as the translation depends on it."""

    switches: frozenset[str] = frozenset()
    """The variables that the model's template takes from a request."""
    thinks: Literal["never", "may", "always", "unknown"] = "never"
    """Whether the model thinks where no switch of the template decides; `unknown` for one that its provider switches."""


@dataclass(frozen=True)
class Translated:
    body: dict[str, Any]
    """The chat body. Values that are absent or null are not in it."""
    origins: Sequence[str]
    """The place in the caller's body that each chat message was made of."""


def to_chat(fields: MessagesFields, reader: Reader) -> Translated:
    """Returns the chat body of a message. Raises `ApiError` 400 for what the model cannot do."""
    prompt = prompt_of(fields, reader)
    own = {
        "max_completion_tokens": fields.max_tokens,
        "stop": fields.stop_sequences or None,
        "stream": fields.stream,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "seed": fields.seed,
        "cache_salt": fields.cache_salt,
        **_end_user(fields.metadata.user_id if fields.metadata else None),
    }
    return Translated(_present(own) | prompt.body, prompt.origins)


def prompt_of(fields: CountFields, reader: Reader) -> Translated:
    """Returns the part of the chat body that makes the prompt and its form. Raises `ApiError` 400."""
    check_cache_control(fields.cache_control, "")
    num_kept = kept_turns(fields.context_management)
    made = turns(fields.system, fields.messages)
    if num_kept is not None:
        clear_thoughts(made.messages, num_kept)
    if not made.messages:
        raise errors.invalid("'messages' must have some content.", "messages")
    body: dict[str, Any] = {"model": fields.model, "messages": made.messages}
    if made.messages[-1]["role"] == "assistant":
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if fields.tools:
        body["tools"] = chat_tools(fields.tools)
    if fields.tool_choice is not None:
        body |= chat_choice(fields.tool_choice)
    body |= _thinking(fields.thinking, reader) | _output(fields.output_config, fields.output_format, reader)
    return Translated(body, made.origins)


def _thinking(wanted: Thinking | None, reader: Reader) -> dict[str, Any]:
    """Returns the fields that switch thinking. `adaptive` leaves the decision to the model, so every model takes it."""
    if wanted is None:
        return {}
    if wanted.type == "between_tools":
        message = "'thinking.type' cannot be 'between_tools': this server writes no notes of progress between calls."
        raise _unsupported(message, "thinking.type")
    if wanted.type not in {"enabled", "disabled", "adaptive"}:
        raise errors.invalid("'thinking.type' must be 'enabled', 'disabled' or 'adaptive'.", "thinking.type")
    if wanted.display not in (None, "summarized", "omitted", "updates"):
        raise errors.invalid("'thinking.display' must be 'summarized', 'omitted' or 'updates'.", "thinking.display")
    is_on = wanted.type != "disabled"
    budget = (
        {"thinking_token_budget": wanted.budget_tokens} if wanted.type == "enabled" and wanted.budget_tokens else {}
    )
    if switch := next((name for name in THINKING if name in reader.switches), None):
        return {"chat_template_kwargs": {switch: is_on}} | budget
    refused, ability = _REFUSED[reader.thinks]
    if wanted.type in refused:
        raise _unsupported(f"'thinking' cannot be '{wanted.type}': this model {ability}.", "thinking.type")
    return budget


def _output(config: OutputConfig | None, old_format: OutputFormat | None, reader: Reader) -> dict[str, Any]:
    """Returns the fields of `output_config`, and of `output_format`, its older place for a form."""
    body: dict[str, Any] = {}
    config = config or OutputConfig()
    name, form = "output_config.format", config.format
    if form is None:
        name, form = "output_format", old_format
    if form is not None:
        if form.type != "json_schema":
            raise errors.invalid(f"'{name}.type' must be 'json_schema'.", f"{name}.type")
        if form.schema is None:
            raise errors.invalid(
                f"Missing required parameter: '{name}.schema'.", f"{name}.schema", "missing_required_parameter"
            )
        json_schema = {"name": "output", "schema": form.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    if config.effort is not None:
        body |= _effort(config.effort, reader)
    return body


def _effort(effort: str, reader: Reader) -> dict[str, Any]:
    if effort not in {"low", "medium", "high", "xhigh", "max"}:
        raise errors.invalid(
            "'output_config.effort' must be 'low', 'medium', 'high', 'xhigh' or 'max'.", "output_config.effort"
        )
    if "reasoning_effort" in reader.switches:
        return {"reasoning_effort": effort}
    if effort == DEFAULT_EFFORT or not reader.switches.isdisjoint(THINKING):
        return {}  # `thinking` decides whether the model thinks; how much is its own decision
    raise _unsupported("'output_config.effort' must be 'high': this model has one effort.", "output_config.effort")


def _end_user(user_id: str | None) -> dict[str, Any]:
    """Returns who the end user is and which conversation this is. Claude Code writes both into one text: a JSON object
    with `device_id`, `account_uuid` and `session_id`, or, in its older versions, `user_…_session_…`.
    """
    if not user_id:
        return {}
    if match := _SESSION.search(user_id):
        return {"user": user_id[: match.start()] or user_id, "prompt_cache_key": match["session"]}
    try:
        told = msgspec.json.decode(user_id) if user_id.startswith("{") else None
    except (msgspec.DecodeError, RecursionError):
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("session_id"), str):
        return {"user": user_id}
    user = told.get("account_uuid") or told.get("device_id")
    return {"user": user if isinstance(user, str) else user_id, "prompt_cache_key": told["session_id"]}


def _present(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _unsupported(message: str, where: str) -> errors.ApiError:
    return errors.invalid(message, where, "unsupported_parameter")
