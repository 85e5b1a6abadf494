"""The tools of a chat body: functions and custom tools that the model may call, and how it may choose among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from gateway.base import errors
from gateway.schema.convert import convert
from gateway.schema.custom_tools import CustomTool, Name, check_size, parameters_of, rules_of
from gateway.structured.rules import Rules

MAX_TOOLS = 1024
"""The largest number of tools. OpenAI takes 128 and Anthropic any number; agents with many MCP servers have hundreds."""
MAX_BYTES = 512 * 1024
"""The largest size of all tools together, as JSON. It bounds the work that they are."""
MAX_DEPTH = 24

Mode = Literal["none", "auto", "required", "named"]


class FunctionTool(msgspec.Struct, frozen=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: FunctionTool | None = None
    custom: CustomTool | None = None


@dataclass(frozen=True)
class Tools:
    """The functions that are offered, in the order of the body, and the choice among them."""

    functions: Sequence[FunctionTool] = ()
    mode: Mode = "none"
    allowed: frozenset[str] = frozenset()
    """The names that may be called."""
    parallel: bool = True
    """Whether one answer may hold several calls."""
    custom: frozenset[str] = frozenset()
    """The names of those whose input is a text. They are functions for the model."""
    grammars: Mapping[str, Rules] = field(default_factory=dict)
    """The rules of those texts that have a grammar in Lark's syntax, by name."""

    @property
    def may_call(self) -> bool:
        return self.mode != "none" and bool(self.allowed)

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def callable(self) -> list[FunctionTool]:
        return [function for function in self.functions if function.name in self.allowed]

    def schema_of(self, name: str) -> Mapping[str, Any]:
        """Returns the schema of a function's arguments; a function without one takes none."""
        return next((one.parameters for one in self.functions if one.name == name and one.parameters), {})

    def plain(self) -> list[dict[str, Any]]:
        """Returns the tools as templates expect them."""
        return [{"type": "function", "function": _plain(function)} for function in self.functions]


NO_TOOLS = Tools()


def _plain(function: FunctionTool) -> dict[str, Any]:
    about = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **about, "parameters": function.parameters or {"type": "object", "properties": {}}}


def has_grammar(tools: Sequence[Any] | None) -> bool:
    """Returns whether a tool may be a custom one, whose grammar has to be read."""
    return any(isinstance(tool, dict) and tool.get("type") == "custom" for tool in tools or ())


def read_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`. Raises `ApiError` 400."""
    given = [_function(f"tools[{i}]", tool) for i, tool in enumerate(_bounded(tools or ()))]
    functions = [function for function, _ in given]
    custom = {function.name: tool for function, tool in given if tool is not None}
    names = [function.name for function in functions]
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            raise errors.invalid(f"There are two tools with the name '{name}'.", f"tools[{i}].function.name")
        seen.add(name)
    mode, allowed = _choice(choice, names)
    check_size(custom.values())
    grammars = {
        function.name: rules
        for i, (function, tool) in enumerate(given)
        if tool is not None and (rules := rules_of(tool, f"tools[{i}].custom.format")) is not None
    }
    return Tools(functions, mode, allowed, parallel is not False and mode != "named", frozenset(custom), grammars)


def _bounded(tools: Sequence[Any]) -> Sequence[Any]:
    if len(tools) > MAX_TOOLS:
        raise errors.invalid(f"At most {MAX_TOOLS} tools are allowed.", "tools")
    if len(msgspec.json.encode(tools)) > MAX_BYTES:
        raise errors.invalid(f"The tools have more than {MAX_BYTES // 1024} KiB.", "tools")
    for i, tool in enumerate(tools):
        if _is_deeper(tool, MAX_DEPTH):
            raise errors.invalid(f"The tool is nested deeper than {MAX_DEPTH} levels.", f"tools[{i}]")
    return tools


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(one, depth - 1) for one in inner)


def _function(where: str, value: Any) -> tuple[FunctionTool, CustomTool | None]:
    """Returns a function, and the tool of the type `custom` that it stands for."""
    if not isinstance(value, dict):
        raise errors.invalid("A tool must be an object.", where, "invalid_type")
    tool: Tool = _converted(where, value)
    if tool.type == "custom" and tool.custom is not None:
        custom = tool.custom
        parameters = parameters_of(custom, f"{where}.custom.format")
        return FunctionTool(custom.name, custom.description, parameters, strict=True), custom
    if tool.type not in ("function", "custom"):
        message = "Only tools of the types 'function' and 'custom' are served."
        raise errors.invalid(message, f"{where}.type", "unsupported_parameter")
    if tool.function is None or tool.type == "custom":
        param = f"{where}.{tool.type}"
        raise errors.invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return tool.function, None


def _converted(where: str, value: Any) -> Tool:
    return convert(_without_nulls(value), Tool, where)


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool in which a null counts as absent; a schema keeps its nulls."""
    present = {name: item for name, item in value.items() if item is not None}
    for kind in ("function", "custom"):
        if isinstance(present.get(kind), dict):
            present[kind] = {name: item for name, item in present[kind].items() if item is not None}
    return present


def _choice(choice: Any, names: Sequence[str]) -> tuple[Mode, frozenset[str]]:
    known = frozenset(names)
    match choice:
        case None | "auto":
            return ("auto" if names else "none"), known
        case "none":
            return "none", frozenset()
        case "required":
            _need_tools(names)
            return "required", known
        case {"type": "function", "function": {"name": str() as name}} | {"type": "function", "name": str() as name}:
            return "named", frozenset([_known(name, known, "tool_choice.function.name")])
        case {"type": "custom", "custom": {"name": str() as name}}:
            return "named", frozenset([_known(name, known, "tool_choice.custom.name")])
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list() as tools},
        }:
            return _allowed(mode, tools, known)
        case str() | dict():
            raise errors.invalid(
                "'tool_choice' must be 'none', 'auto', 'required', a function or 'allowed_tools'.", "tool_choice"
            )
        case _:
            raise errors.invalid("'tool_choice' must be a string or an object.", "tool_choice", "invalid_type")


def _allowed(mode: Mode, tools: Sequence[Any], known: frozenset[str]) -> tuple[Mode, frozenset[str]]:
    where = "tool_choice.allowed_tools.tools"
    if len(tools) > MAX_TOOLS:
        raise errors.invalid(f"At most {MAX_TOOLS} tools are allowed.", where)
    names: list[str] = []
    for i, tool in enumerate(tools):
        match tool:
            case (
                {"type": "function", "function": {"name": str() as name}}
                | {"type": "function", "name": str() as name}
                | {"type": "custom", "custom": {"name": str() as name}}
            ):
                names.append(_known(name, known, f"{where}[{i}]"))
            case _:
                raise errors.invalid(
                    "An allowed tool must be a function or a custom tool, with a name.", f"{where}[{i}]"
                )
    if not names:
        raise errors.invalid("At least one allowed tool is needed.", where)
    return mode, frozenset(names)


def _need_tools(names: Collection[str]) -> None:
    if not names:
        raise errors.invalid("'tool_choice' needs 'tools'.", "tool_choice")


def _known(name: str, known: frozenset[str], where: str) -> str:
    _need_tools(known)
    if name not in known:
        raise errors.invalid("'tool_choice' names a tool that 'tools' does not have.", where)
    return name
