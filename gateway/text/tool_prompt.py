"""Tools for a model whose template knows none: the conversation tells of them in words, in the form of Hermes. The
module is pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

INTRODUCTION = (
    "You may call functions to help with the request. Their signatures, as JSON, are:\n<tools>\n{tools}\n</tools>\n\n"
    "To call a function, answer with a JSON object with its name and its arguments, between these tags; one pair of "
    'tags for each call:\n<tool_call>\n{{"name": "<name>", "arguments": {{<arguments>}}}}\n</tool_call>\n'
    "Results come between <tool_response> and </tool_response>."
)


def in_words(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages without tool calls and without tool turns. The texts of tools and of messages are safe."""
    told = INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    found: list[dict[str, Any]] = []
    if not messages or messages[0]["role"] != "system":
        found.append({"role": "system", "content": told})
    has_results = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and has_results:
            found[-1]["content"] += "\n" + _result(message)
        elif is_result:
            found.append({"role": "user", "content": _result(message)})
        else:
            found.append(_turn(message))
        has_results = is_result
    if messages and messages[0]["role"] == "system":
        found[0]["content"] += f"\n\n{told}"
    return found


def _result(message: dict[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = [message["content"]] if message["content"] else []
    texts += [_call(call["function"]) for call in message.get("tool_calls", ())]
    return plain | {"content": "\n".join(texts)}


def _call(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {text or "{}"}}}\n</tool_call>'
