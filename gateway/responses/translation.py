"""A body of `/v1/responses` becomes a body of chat, and a fault that chat finds is reported with the caller's field
names. The module is pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.base import errors
from gateway.responses.items import Conversation, Unseal, qualified
from gateway.schema.responses import PASSED_ON, ResponseFields

HISTORY = "previous_response_id"

_MESSAGE = re.compile(r"messages\[(\d+)\]")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function|\.custom)?")
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tool_choice.custom": "tool_choice",
}
"""The names of chat with those of Responses. The longer of two that begin alike stands first."""


@dataclass(frozen=True)
class Translated:
    body: dict[str, Any]
    """The body of `POST /v1/chat/completions`."""
    paths: Sequence[str]
    """The item from which each message came, such as `input[3]`."""
    tool_paths: Sequence[str] = ()
    """The place from which each tool came, such as `tools[3]`."""
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The (namespace, name) of each function in a namespace, by the name that the model sees."""

    def told(self, fault: errors.ApiError) -> errors.ApiError:
        """Returns a fault of chat with the names that the caller used, in place."""
        if fault.param is not None:
            param = self._name(fault.param)
            fault.message = fault.message.replace(f"'{fault.param}'", f"'{param}'")
            fault.param = param
        return fault

    def _name(self, param: str) -> str:
        if match := _MESSAGE.match(param):
            path = self.paths[int(match[1])] if int(match[1]) < len(self.paths) else "input"
            # Instructions are a text, and history is no field of this body: neither has a path inside.
            return path + param[match.end() :] if path.startswith("input[") else path.partition("[")[0]
        if (match := _TOOL.match(param)) and int(match[1]) < len(self.tool_paths):
            return self.tool_paths[int(match[1])] + param[match.end() :].replace(".format.grammar", ".format")
        for theirs, ours in _NAMES.items():
            if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
                return ours + param[len(theirs) :]
        return param


def translate(
    value: Mapping[str, Any], fields: ResponseFields, items: Sequence[Any], unseal: Unseal, history: Sequence[Any] = ()
) -> Translated:
    """Returns the body for chat. `items` is the input, and `history` has the items of the responses before, oldest
    first. Raises `ApiError` 400.
    """
    conversation = Conversation(unseal)
    if fields.instructions:
        conversation.add_instructions(fields.instructions)
    conversation.add_all(history, HISTORY)
    conversation.add_all(items, "input")
    if not conversation.messages:
        raise errors.invalid("Missing required parameter: 'input'.", "input", "missing_required_parameter")
    body = {name: value[name] for name in PASSED_ON if value.get(name) is not None}
    body |= {"model": fields.model, "messages": conversation.messages}
    wanted: dict[str, Any] = {
        "max_completion_tokens": fields.max_output_tokens,
        "response_format": _format(fields),
        "reasoning_effort": fields.reasoning and fields.reasoning.effort,
        "stream": fields.stream,
    }
    if fields.wants_logprobs:
        wanted |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    body |= {name: item for name, item in wanted.items() if item is not None}
    choice, tools = _choice(fields.tool_choice, _tools(fields))
    if choice is not None:
        body["tool_choice"] = choice
    if tools:
        body["tools"] = [{"type": tool.kind, tool.kind: tool.about} for tool in tools]
    return Translated(body, conversation.paths, [tool.path for tool in tools], _names(fields))


def _format(fields: ResponseFields) -> dict[str, Any] | None:
    """Returns chat's `response_format`, which has the schema one level deeper."""
    given = fields.text and fields.text.format
    if not given or given.get("type") == "text":
        return None
    if given.get("type") != "json_schema":
        return {"type": given.get("type")}
    schema = {name: item for name, item in given.items() if name != "type" and item is not None}
    if "schema" not in schema:
        raise errors.invalid(
            "Missing required parameter: 'text.format.schema'.", "text.format.schema", "missing_required_parameter"
        )
    return {"type": "json_schema", "json_schema": schema}


@dataclass(frozen=True)
class _Tool:
    """A tool in chat's form, and the place where the caller named it."""

    path: str
    kind: Literal["function", "custom"]
    about: dict[str, Any]

    @property
    def name(self) -> Any:
        return self.about.get("name")


def _tools(fields: ResponseFields) -> list[_Tool]:
    """Returns all functions. Those of a namespace get its name in front. Raises `ApiError` 400."""
    found: list[_Tool] = []
    for index, tool in enumerate(fields.tools or ()):
        path = f"tools[{index}]"
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            found += _namespace(tool, path)
        else:
            found.append(_tool(tool, path))
    return found


def _namespace(tool: dict[str, Any], path: str) -> list[_Tool]:
    name, about, tools = tool.get("name"), tool.get("description"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise errors.invalid("A namespace needs a name.", f"{path}.name", "invalid_type")
    if not isinstance(tools, list):
        raise errors.invalid("A namespace needs a list of tools.", f"{path}.tools", "invalid_type")
    found = [_tool(one, f"{path}.tools[{index}]") for index, one in enumerate(tools)]
    for one in found:
        if isinstance(one.name, str):
            one.about["name"] = qualified(name, one.name)
        texts = [text for text in (about, one.about.get("description")) if isinstance(text, str) and text]
        if texts:
            one.about["description"] = "\n".join(texts)
    return found


def _tool(tool: Any, path: str) -> _Tool:
    """Returns chat's form of a tool, which stands one level deeper."""
    if not isinstance(tool, dict):
        raise errors.invalid("A tool must be an object.", path, "invalid_type")
    if tool.get("type") not in ("function", "custom"):
        message = (
            "Only tools of type 'function' and 'custom' are served; a client can offer its own tools as functions."
        )
        raise errors.invalid(message, f"{path}.type", "unsupported_parameter")
    for name in ("defer_loading", "async"):
        if tool.get(name):
            raise errors.invalid(f"'{name}' is not supported.", f"{path}.{name}", "unsupported_parameter")
    if tool["type"] == "custom":
        return _custom(tool, path)
    known = ("name", "description", "parameters", "strict")
    return _Tool(path, "function", {name: tool[name] for name in known if tool.get(name) is not None})


def _custom(tool: dict[str, Any], path: str) -> _Tool:
    """Returns chat's form of a custom tool, which has the grammar one level deeper."""
    about = {name: tool[name] for name in ("name", "description", "format") if tool.get(name) is not None}
    given = about.get("format")
    if isinstance(given, dict) and given.get("type") == "grammar":
        grammar = {name: item for name, item in given.items() if name != "type"}
        about["format"] = {"type": "grammar", "grammar": grammar}
    return _Tool(path, "custom", about)


def _names(fields: ResponseFields) -> dict[str, tuple[str, str]]:
    """Returns the (namespace, name) of each function in a namespace, by the name that the model sees."""
    spaces = (tool for tool in fields.tools or () if tool["type"] == "namespace")
    each = ((space["name"], one.get("name")) for space in spaces for one in space["tools"])
    return {qualified(space, name): (space, name) for space, name in each if isinstance(name, str)}


def _choice(choice: Any, tools: list[_Tool]) -> tuple[Any, list[_Tool]]:
    """Returns chat's choice, and the tools that the model may see. Raises `ApiError` 400."""
    if not isinstance(choice, dict):
        return choice, tools
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}, tools
        case "custom":
            return {"type": "custom", "custom": {"name": choice.get("name")}}, tools
        case "allowed_tools":
            return _allowed(choice, tools)
        case _:
            message = "Only 'function', 'custom' and 'allowed_tools' can be chosen."
            raise errors.invalid(message, "tool_choice.type", "unsupported_parameter")


def _allowed(choice: dict[str, Any], tools: list[_Tool]) -> tuple[Any, list[_Tool]]:
    """Keeps the allowed tools only: a tool that may not be called is not shown."""
    mode, named = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise errors.invalid("The mode must be 'auto' or 'required'.", "tool_choice.mode")
    if not isinstance(named, list) or not all(isinstance(tool, dict) for tool in named):
        raise errors.invalid("A list of tools is needed.", "tool_choice.tools", "invalid_type")
    names = {name for tool in named if isinstance(name := tool.get("name"), str)}
    if not names or not names <= {tool.name for tool in tools if isinstance(tool.name, str)}:
        raise errors.invalid("Each allowed tool must be one of 'tools'.", "tool_choice.tools")
    return mode, [tool for tool in tools if tool.name in names]


def echo(fields: ResponseFields, value: Mapping[str, Any], effective: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a Response object that repeat the request. `effective` has the sampling values in force."""
    reasoning, text = fields.reasoning, fields.text
    shown = {
        "background": bool(fields.background),
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": value.get("metadata") or {},
        "model": fields.model,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": value.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": value.get("safety_identifier"),
        "service_tier": "default",
        "text": {
            "format": (text and text.format) or {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": [_shown_tool(tool) for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": "disabled",
        "user": value.get("user"),
    }
    return shown | dict(effective)


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    absent = {"description": None, "parameters": None, "strict": None}
    return absent | tool if tool["type"] == "function" else tool
