"""Tools of a Messages body, and the choice among them, in the words of a chat body. The module is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.base import errors
from gateway.messages.cache_control import check_cache_control
from gateway.messages.fields import ToolChoice

_OFF: Mapping[str, Any] = {"defer_loading": (None, False), "input_examples": (None, []), "allowed_callers": (None, [])}
"""Fields of a tool that would change the prompt and are not offered, with the values that ask for nothing."""


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the tools as functions of a chat body. Raises `ApiError` 400."""
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise errors.invalid(f"'{where}' must be an object.", where, "invalid_type")
    if tool.get("type") not in (None, "custom"):
        raise errors.invalid(
            f"'{where}' is a tool that Anthropic defines. Give its 'name', 'description' and 'input_schema', "
            "and run it in your own program.",
            f"{where}.type",
            "unsupported_parameter",
        )
    check_cache_control(tool.get("cache_control"), where)
    for name, off in _OFF.items():
        if tool.get(name) not in off and tool.get(name) != ["direct"]:
            raise errors.invalid(f"'{where}.{name}' is not supported.", f"{where}.{name}", "unsupported_parameter")
    if not isinstance(tool.get("input_schema"), dict):
        raise errors.invalid(f"'{where}.input_schema' must be a JSON schema.", f"{where}.input_schema", "invalid_type")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {name: item for name, item in function.items() if item is not None}}


def chat_choice(choice: ToolChoice) -> dict[str, Any]:
    """Returns the fields `tool_choice` and `parallel_tool_calls` of a chat body. Raises `ApiError` 400."""
    wanted: Any
    if choice.type == "tool":
        if not choice.name:
            raise errors.invalid("'tool_choice.name' must name a tool.", "tool_choice.name")
        wanted = {"type": "function", "function": {"name": choice.name}}
    else:
        wanted = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if wanted is None:
        raise errors.invalid("'tool_choice.type' must be 'auto', 'any', 'tool' or 'none'.", "tool_choice.type")
    return {"tool_choice": wanted} | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})
