"""A checked body as an upstream is asked: what is reserved for the prompt, and which fields are passed on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.base.upstream_source import UpstreamModel, UpstreamSource
from gateway.generation.served import foreign
from gateway.routes import bought
from gateway.schema import chat, completions
from gateway.upstreams.market import Market, UpstreamLink
from gateway.upstreams.wires.values import Ask, Upstream

TOOLS = [{"type": "function", "function": {"name": "look"}}]


def link() -> UpstreamLink:
    market = Market()
    models = {"m": UpstreamModel(max_output_tokens=100)}
    market.replace([Upstream("mock", UpstreamSource(url="http://127.0.0.1:1/v1", models=models))])
    return market.links["m"]


def asked(**body: Any) -> Ask:
    value = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
    return bought.chat_ask(link(), value, chat.read(value)[0], None)


def asked_to_complete(**body: Any) -> Ask:
    value, one = {"model": "m", "prompt": "hi"} | body, link()
    model = foreign.served({"m": one})["m"]
    return bought._completion_ask(one, value, completions.read(value)[0], model, "hi")


def test_a_schema_is_reserved_as_a_part_of_the_prompt_that_a_provider_may_leave_out() -> None:
    """Its tokens were billed to the operator alone."""
    properties = {f"p{i}": {"type": "string", "description": "x" * 100} for i in range(400)}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": properties}}}
    prompt, plain = asked(response_format=form).prompt, asked().prompt
    assert prompt.high >= plain.high + len(msgspec.json.encode(form))
    assert (prompt.low, prompt.best) == (plain.low, plain.best)


@pytest.mark.parametrize(
    "body",
    [
        {"tools": []},
        {"stop": []},
        {"logit_bias": {}},
        {"response_format": {}},
        {"reasoning_effort": ""},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"tool_choice": "auto"},
    ],
)
def test_a_field_that_asks_for_nothing_is_not_passed_on(body: dict[str, Any]) -> None:
    """Providers refuse some of them, and one was refused here."""
    assert set(asked(**body).body) == {"messages"}


def test_a_field_that_asks_for_something_is_passed_on_as_it_came() -> None:
    body = {
        "tools": TOOLS,
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "temperature": 0,
        "seed": 0,
        "stop": "a",
    }
    assert {name: asked(**body).body[name] for name in body} == body


def test_completions_that_may_be_cut_get_what_the_upstream_gives() -> None:
    assert asked_to_complete(max_tokens=101, truncate=True).max_tokens == 100
    assert set(asked_to_complete(stop=[]).body) == {"prompt"}
