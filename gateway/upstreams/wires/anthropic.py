"""Upstreams that speak Anthropic's Messages API: chat in its words, and its events in ours. The module is pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from accounting.values.types import Usage
from gateway.base import errors
from gateway.upstreams.wires.values import Ask, CallDelta, Chunk, Garbage, Outgoing, Stated, Upstream, their_name
from gateway.upstreams.wires.wire import Failure, decoded, id_of, number_of, parts_of, text_of

VERSION = "2023-06-01"
FINISHES = {
    **{"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls"},
    **{"max_tokens": "length", "model_context_window_exceeded": "length", "refusal": "content_filter"},
}
PASSED = frozenset({"messages", "temperature", "top_p", "top_k", "stop", "tools", "tool_choice", "parallel_tool_calls"})
"""The fields of chat that have a word in Messages. Any other is refused."""


class AnthropicWire:
    def request(self, upstream: Upstream, served: str, ask: Ask) -> Outgoing:
        body = message_body(ask) | {"model": their_name(served, upstream.model(served)), "stream": True}
        return Outgoing(f"{upstream.source.url}/messages", _headers(upstream), msgspec.json.encode(body))

    def reader(self, ask: Ask) -> AnthropicReader:
        return AnthropicReader()

    def whole(self, data: bytes, ask: Ask) -> Sequence[Chunk]:
        raise Garbage("this API has no embeddings")

    def probe(self, upstream: Upstream) -> Outgoing | None:
        return Outgoing(f"{upstream.source.url}/models", _headers(upstream), b"")


def _headers(upstream: Upstream) -> dict[str, str]:
    version = upstream.source.api_version or VERSION
    return {"content-type": "application/json", "x-api-key": upstream.credential, "anthropic-version": version}


def check(ask: Ask) -> None:
    """Raises `ApiError` 400 for what Messages cannot say."""
    if ask.endpoint != "chat":
        raise errors.invalid("This model answers chat only.", "model", "unsupported_parameter")
    if ask.num_choices > 1:
        raise errors.invalid("This model gives one choice.", "n", "unsupported_parameter")
    for name in ask.body:
        if name not in PASSED:
            raise errors.invalid(f"This model's provider does not know '{name}'.", name, "unsupported_parameter")
    if (ask.body.get("temperature") or 0) > 1:
        raise errors.invalid("This model takes a temperature from 0 to 1.", "temperature")
    choice = ask.body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise errors.invalid(
            "This model's provider does not know 'allowed_tools'.", "tool_choice", "unsupported_parameter"
        )
    for number, tool in enumerate(ask.body.get("tools") or ()):
        if tool["function"].get("strict"):
            where = f"tools[{number}].function.strict"
            raise errors.invalid("This model's provider enforces no schema of a tool.", where, "unsupported_parameter")
    for number, message in enumerate(ask.body["messages"]):
        for place, call in enumerate(message.get("tool_calls") or ()):
            try:
                _arguments(call["function"])
            except (ValueError, RecursionError):
                where = f"messages[{number}].tool_calls[{place}].function.arguments"
                raise errors.invalid("The arguments of this call are no JSON, which this model needs.", where) from None


def message_body(ask: Ask) -> dict[str, Any]:
    given = ask.body
    messages = given["messages"]
    system = "\n\n".join(_text(one) for one in messages if one.get("role") in ("system", "developer"))
    body: dict[str, Any] = {"max_tokens": ask.max_tokens, "messages": _turns(messages)}
    if system:
        body["system"] = system
    body |= {name: given[name] for name in ("temperature", "top_p", "top_k") if name in given}
    if "stop" in given:
        body["stop_sequences"] = [given["stop"]] if isinstance(given["stop"], str) else list(given["stop"])
    if given.get("tools"):
        body["tools"] = [_tool(one["function"]) for one in given["tools"]]
        body["tool_choice"] = _choice(given.get("tool_choice"), given.get("parallel_tool_calls"))
    return body


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return content or ""


def _turns(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Joins messages of one side: Messages wants user and assistant by turns."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer"):
            continue
        side = "assistant" if role == "assistant" else "user"
        blocks = _blocks(message)
        if turns and turns[-1]["role"] == side:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": side, "content": blocks})
    return turns


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = _text(message)
    if message.get("role") == "tool":
        return [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": text}]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _arguments(function)})
    return blocks


def _arguments(function: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call. Raises ValueError, RecursionError."""
    return msgspec.json.decode(function["arguments"] or "{}")


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    tool = {"name": function["name"], "input_schema": schema}
    return tool | ({"description": function["description"]} if function.get("description") else {})


def _choice(choice: Any, parallel: Any) -> dict[str, Any]:
    if isinstance(choice, dict):
        found: dict[str, Any] = {"type": "tool", "name": (choice.get("function") or choice).get("name")}
    else:
        found = {"type": {"required": "any", "none": "none"}.get(choice, "auto")}
    if parallel is False and found["type"] != "none":
        found["disable_parallel_tool_use"] = True
    return found


class AnthropicReader:
    def __init__(self) -> None:
        self.has_ended = False
        self._calls: dict[int, int] = {}
        """Blocks that are calls → the number of the call."""
        self._usage: dict[str, Any] = {}

    def read(self, data: bytes) -> Sequence[Chunk]:
        event = decoded(data)
        match event.get("type"):
            case "message_start":
                return self._start(_object(event, "message"))
            case "content_block_start":
                return self._block(number_of(event.get("index"), "index"), _object(event, "content_block"))
            case "content_block_delta":
                return self._delta(number_of(event.get("index"), "index"), _object(event, "delta"))
            case "message_delta":
                told = parts_of(event.get("usage"))
                self._usage |= {name: count for name, count in told.items() if count is not None}
                finish = FINISHES.get(text_of(_object(event, "delta").get("stop_reason"), "stop_reason"), "stop")
                return [Chunk(stated=self._stated(), is_last_statement=True), Chunk(finish=finish)]
            case "message_stop":
                self.has_ended = True
                return ()
            case "error":
                kind = str(_object(event, "error").get("type"))
                raise Failure("error in the stream", is_busy=kind in ("overloaded_error", "rate_limit_error"))
            case _:
                return ()  # pings, ends of blocks, and events that are newer than this reader

    def _start(self, message: dict[str, Any]) -> list[Chunk]:
        usage = message.get("usage")
        if not isinstance(usage, dict):
            return [Chunk(provider_id=id_of(message.get("id")))]
        self._usage |= usage
        return [Chunk(stated=self._stated(), provider_id=id_of(message.get("id")))]

    def _block(self, index: int, block: dict[str, Any]) -> list[Chunk]:
        if block.get("type") != "tool_use":
            return [Chunk(text=text_of(block.get("text"), "text"))] if block.get("type") == "text" else []
        number = self._calls.setdefault(index, len(self._calls))
        call = CallDelta(number, text_of(block.get("id"), "id"), text_of(block.get("name"), "name"))
        return [Chunk(calls=(call,))]

    def _delta(self, index: int, delta: dict[str, Any]) -> list[Chunk]:
        match delta.get("type"):
            case "text_delta":
                return [Chunk(text=text_of(delta.get("text"), "text"))]
            case "thinking_delta":
                return [Chunk(reasoning=text_of(delta.get("thinking"), "thinking"))]
            case "input_json_delta" if index in self._calls:
                return [
                    Chunk(calls=(CallDelta(self._calls[index], arguments=text_of(delta.get("partial_json"), "input")),))
                ]
            case "input_json_delta":
                raise Garbage("arguments of no call")
            case _:
                return []  # signatures and citations

    def _stated(self) -> Stated | None:
        try:
            counts = {
                name: number_of(self._usage.get(name), name)
                for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
            }
        except Garbage:
            return None
        read, write = counts["cache_read_input_tokens"], counts["cache_creation_input_tokens"]
        return Stated(Usage(read, write, counts["input_tokens"], counts["output_tokens"]))


def _object(event: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    if not isinstance(value, dict):
        raise Garbage(f"{name} is not an object")
    return value
