"""Upstreams that speak OpenAI's API, and Azure's, which differs in address and header. The module is pure."""

from __future__ import annotations

import base64
import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from accounting.values.types import Usage
from gateway.upstreams.wires.values import Ask, CallDelta, Chunk, Garbage, Outgoing, Stated, Upstream, their_name
from gateway.upstreams.wires.wire import Failure, decoded, id_of, number_of, objects_of, parts_of, text_of

PATHS = {"chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings"}
AZURE_VERSION = "2024-10-21"
FINISHES = {
    **{"stop": "stop", "length": "length", "content_filter": "content_filter"},
    **{"tool_calls": "tool_calls", "function_call": "tool_calls"},
}
MAX_CALLS = 128


class OpenAIWire:
    def request(self, upstream: Upstream, served: str, ask: Ask) -> Outgoing:
        model = upstream.model(served)
        body = dict(ask.body) | {"model": their_name(served, model)}
        if ask.endpoint == "embeddings":
            body["encoding_format"] = "float"
        else:
            options = {"include_usage": True}
            if upstream.source.continuous_usage:
                options["continuous_usage_stats"] = True
            field = upstream.source.output_field if ask.endpoint == "chat" else "max_tokens"
            body |= {"stream": True, "stream_options": options, field: ask.max_tokens}
            if ask.num_choices > 1:
                body["n"] = ask.num_choices
        url = self._url(upstream, their_name(served, model), PATHS[ask.endpoint])
        return Outgoing(url, self._headers(upstream), msgspec.json.encode(body))

    def reader(self, ask: Ask) -> OpenAIReader:
        return OpenAIReader(ask)

    def whole(self, data: bytes, ask: Ask) -> Sequence[Chunk]:
        body = decoded(data)
        found = [
            Chunk(number_of(one.get("index"), "index"), vector=_vector(one.get("embedding")))
            for one in objects_of(body.get("data"), "data")
        ]
        if sorted(chunk.index for chunk in found) != list(range(ask.num_choices)):
            raise Garbage("the number of vectors differs from the number of inputs")
        return [
            *found,
            Chunk(stated=stated_of(body.get("usage")), is_last_statement=True, provider_id=id_of(body.get("id"))),
        ]

    def probe(self, upstream: Upstream) -> Outgoing | None:
        return Outgoing(f"{upstream.source.url}/models", self._headers(upstream), b"")

    def _url(self, upstream: Upstream, model: str, path: str) -> str:
        return upstream.source.url + path

    def _headers(self, upstream: Upstream) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
        return headers | ({"authorization": f"Bearer {upstream.credential}"} if upstream.credential else {})


class AzureWire(OpenAIWire):
    """Azure names the deployment in the path, and the key in its own header."""

    def probe(self, upstream: Upstream) -> Outgoing | None:
        return Outgoing(
            f"{upstream.source.url}/openai/models?api-version={_version(upstream)}", self._headers(upstream), b""
        )

    def _url(self, upstream: Upstream, model: str, path: str) -> str:
        return f"{upstream.source.url}/openai/deployments/{model}{path}?api-version={_version(upstream)}"

    def _headers(self, upstream: Upstream) -> dict[str, str]:
        return {"content-type": "application/json", "api-key": upstream.credential}


def _version(upstream: Upstream) -> str:
    return upstream.source.api_version or AZURE_VERSION


class OpenAIReader:
    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._finished: set[int] = set()
        self._calls: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        """The ids and names of the calls of each choice."""
        self.has_ended = False

    def read(self, data: bytes) -> Sequence[Chunk]:
        if data.strip() == b"[DONE]":
            self.has_ended = True
            return ()
        event = decoded(data)
        if event.get("error"):
            raise _failure(event["error"])
        choices = objects_of(event.get("choices"), "choices")
        found = [self._choice(choice) for choice in choices]
        if event.get("usage") is not None:
            found.append(Chunk(stated=stated_of(event["usage"]), is_last_statement=self._are_all_finished))
        if found and (provider_id := id_of(event.get("id"))):
            found.append(Chunk(provider_id=provider_id))
        return found

    @property
    def _are_all_finished(self) -> bool:
        return len(self._finished) == self._ask.num_choices

    def _choice(self, choice: dict[str, Any]) -> Chunk:
        index = number_of(choice.get("index"), "index")
        if index >= self._ask.num_choices:
            raise Garbage("a choice that was not asked for")
        finish = choice.get("finish_reason")
        if finish is not None and not isinstance(finish, str):
            raise Garbage("finish_reason is not text")
        if finish:
            self._finished.add(index)
        ended = FINISHES.get(finish, "stop") if finish else None
        if self._ask.endpoint == "completions":
            return Chunk(index, text_of(choice.get("text"), "text"), finish=ended)
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise Garbage("delta is not an object")
        reasoning = text_of(delta.get("reasoning_content") or delta.get("reasoning"), "reasoning")
        text = text_of(delta.get("content"), "content") + text_of(delta.get("refusal"), "refusal")
        calls = objects_of(delta.get("tool_calls"), "tool_calls")
        return Chunk(index, text, reasoning, tuple(self._call(index, call) for call in calls), ended)

    def _call(self, choice: int, call: dict[str, Any]) -> CallDelta:
        """Reads a piece of a call. Some providers number no calls, and some say id and name in each piece."""
        function = call.get("function") or {}
        if not isinstance(function, dict):
            raise Garbage("a tool call has no function")
        texts = (call.get("id"), function.get("name"), function.get("arguments"))
        call_id, name, arguments = (text_of(value, "tool call") for value in texts)
        begun = self._calls[choice]
        if call.get("index") is not None:
            index = number_of(call["index"], "index of a call")
        else:
            goes_on = bool(begun) and (not name or begun[-1] == (call_id or None, name))
            index = len(begun) - goes_on
        if index >= MAX_CALLS:
            raise Garbage("too many tool calls")
        if index >= len(begun):
            begun.append((call_id, name))
            return CallDelta(index, call_id, name, arguments)
        if name not in ("", begun[index][1]):
            raise Garbage("a tool call has two names")
        return CallDelta(index, arguments=arguments)


def stated_of(usage: Any) -> Stated | None:
    """Reads a usage. One that is none counts as missing: it must not end a good answer."""
    if not isinstance(usage, dict):
        return None
    try:
        return _stated(usage)
    except Garbage:
        return None


def _stated(usage: dict[str, Any]) -> Stated:
    of_prompt = parts_of(usage.get("prompt_tokens_details"))
    of_output = parts_of(usage.get("completion_tokens_details"))
    prompt = number_of(usage.get("prompt_tokens"), "prompt_tokens")
    output = number_of(usage.get("completion_tokens"), "completion_tokens")
    read = min(prompt, number_of(of_prompt.get("cached_tokens"), "cached_tokens"))
    write = min(prompt - read, number_of(of_prompt.get("cache_write_tokens"), "cache_write_tokens"))
    reasoning = min(output, number_of(of_output.get("reasoning_tokens"), "reasoning_tokens"))
    cost = usage.get("cost")
    return Stated(Usage(read, write, prompt - read - write, output), reasoning, _micro_units(cost))


def _micro_units(cost: Any) -> int | None:
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < 1e6:  # neither is NaN
        return None
    return round(cost * 1_000_000)


def _vector(value: Any) -> bytes:
    """Returns float32, little endian, of a list of numbers or of base64. Raises `Garbage` if they are none or not finite."""
    found = array("f")
    try:
        if isinstance(value, str):
            found.frombytes(base64.b64decode(value, validate=True))
        elif isinstance(value, list) and all(isinstance(one, int | float) for one in value):
            found.extend(value)
    except (ValueError, OverflowError):  # also binascii.Error, a letter beyond ASCII, and a part of a number
        raise Garbage("an embedding is no base64 of numbers, or a number is out of range") from None
    if not found or not math.isfinite(sum(found)):
        raise Garbage("an embedding is not a list of finite numbers")
    return found.tobytes()


def _failure(error: Any) -> Failure:
    kind = str(error.get("code") or error.get("type") if isinstance(error, dict) else error)[:64]
    return Failure("error in the stream", is_busy="overloaded" in kind or "rate" in kind or kind == "429")
