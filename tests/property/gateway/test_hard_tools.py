"""Hard schemas as parameters of tools: a forced call has arguments that satisfy them, and no others."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jsonschema
import pytest
from hard_schemas import CASES, closed
from walks import matches, walk

from gateway.base.errors import ApiError
from gateway.parsers.dialects import DIALECTS, OutputSyntax
from gateway.parsers.forced import Wanted, form_of
from gateway.parsers.parts import Folded
from gateway.schema.tools import FunctionTool, Tools

SYNTAX = OutputSyntax(DIALECTS["hermes"])
BEGIN, END = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"
BY_NAME = {case.name: case for case in CASES}


def forced(parameters: Any) -> tuple[Any, Tools]:
    tools = Tools((FunctionTool("f", None, parameters),), "required", frozenset({"f"}), parallel=False)
    form = form_of(Wanted(SYNTAX, tools, None, False, {}))
    assert form is not None
    return form, tools


def is_object(schema: Any) -> bool:
    """Whether only objects satisfy it, by our own words."""
    if schema in ({}, True):
        return False
    with contextlib.suppress(ApiError):
        forced(schema)
        return True
    return False


@pytest.mark.parametrize("num_calls", [3, pytest.param(100, marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_satisfy_a_hard_schema(name: str, num_calls: int) -> None:
    case = BY_NAME[name]
    schema, wrap = case.schema, "%s"
    if not is_object(schema):
        if "$ref" in json.dumps(schema):
            pytest.skip("its references are to the root of the schema")
        schema, wrap = closed({"value": schema}), '{"value":%s}'
    form, tools = forced(schema)
    for text in case.good:
        assert matches(form.grammar, f"{BEGIN}{wrap % text}{END}"), text[:80]
        assert form.keeps_call("f", wrap % text), text[:80]
    for text in case.bad:
        assert not matches(form.grammar, f"{BEGIN}{wrap % text}{END}"), text[:80]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for seed in range(num_calls):
        output = walk(form.grammar, seed, 1000)
        if output is None:
            continue
        parser = SYNTAX.parser(tools, False)()
        (call,) = Folded.of([*parser.push(output), *parser.end()]).calls
        assert form.keeps_call("f", call[1]) and parser.has_calls
        if not any(
            word in json.dumps(schema) for word in ("multipleOf", "inimum", "aximum")
        ):  # decimals: see test_hard_schemas
            assert validator.is_valid(json.loads(call[1])), call[1]
