"""Grammars of forced calls: whatever a model draws in them, its dialect's parser reads calls that validate."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from walks import tokens_of

from gateway.base.errors import ApiError
from gateway.parsers.dialects import DIALECTS, STYLES, OutputSyntax
from gateway.parsers.forced import Wanted, form_of
from gateway.parsers.parts import Folded
from gateway.schema.tools import FunctionTool, Tools
from gateway.structured import form as structured
from gateway.structured.form import Form, JsonSchema, ResponseFormat
from workers.engine.grammars.grammar import begin
from workers.engine.grammars.library import Library

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[a-z<>/\\[\\]]{1,6}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
        "kind": {"enum": ["a", 'say "b"']},
    },
    "required": ["city", "days", "kind"],
    "additionalProperties": False,
}
FUNCTIONS = (FunctionTool("get_weather", None, SCHEMA, True), FunctionTool("now", None, None, True))
NAMES = frozenset({"get_weather", "now"})
END = 256


class Model:
    """A vocabulary of bytes and special tokens, and random draws from it under a grammar."""

    def __init__(self, special: Sequence[str]) -> None:
        self.special = {text: END + 1 + i for i, text in enumerate(special)}
        self.texts = {number: text for text, number in self.special.items()}
        vocabulary = [*(bytes([i]) for i in range(256)), b"", *(b"\xff" + text.encode() for text in special)]
        self._library = Library(vocabulary)

    def draw(self, grammar: str, seed: int, before: str = "", most: int = 3000) -> str:
        """An output that begins with `before`, and ends where the grammar lets it."""
        rng = random.Random(seed)
        one = begin(self._library.compile(grammar), [END])
        output, waiting = b"", self._tokens(before)
        for _ in range(most):
            allowed = tokens_of(one.mask)
            if waiting:
                token = waiting.pop(0)
                assert token in allowed, (output, token)
            elif END in allowed and rng.random() < 0.7:
                break
            else:
                texts = [token for token in allowed if token != END]
                closing = [token for token in texts if token > END or token in b'"}]']
                token = rng.choice(closing if closing and rng.random() < 0.6 else texts)
            output += self.texts[token].encode() if token > END else bytes([token])
            one.advance(token)
            assert not one.fault, one.fault
            if one.ended:
                break
        else:
            raise AssertionError(f"no end: {output!r}")
        return output.decode()

    def _tokens(self, text: str) -> list[int]:
        marks = "|".join(map(re.escape, self.special))
        pieces = re.split(f"({marks})", text) if marks else [text]
        return [
            token for piece in pieces for token in ([self.special[piece]] if piece in self.special else piece.encode())
        ]


def syntax_of(dialect: str, style: str = "none") -> OutputSyntax:
    return OutputSyntax(DIALECTS[dialect], STYLES[style])


PLAIN = ("hermes", "llama", "pythonic", "deepseek", "harmony")
"""Dialects that are tried in a model to which their marks are plain text, too."""
MODELS = {
    (dialect, has_special): Model(syntax_of(dialect, "brackets").marks if has_special else ())
    for dialect in DIALECTS
    for has_special in (False, True)
    if has_special or dialect in PLAIN
}
EVERY = pytest.mark.parametrize(("dialect", "has_special"), MODELS)


def read(syntax: OutputSyntax, tools: Tools, output: str, is_open: bool = False) -> Folded:
    parser = syntax.parser(tools, is_open)()
    return Folded.of([*parser.push(output), *parser.end()])


def check(calls: Any, form: Form) -> None:
    for call, text in calls:
        jsonschema.validate(json.loads(text), SCHEMA if call.name == "get_weather" else {"maxProperties": 0})
        assert form.keeps_call(call.name, text)


@EVERY
@pytest.mark.parametrize("mode", ["required", "named"])
def test_a_forced_answer_is_calls_and_nothing_else(dialect: str, has_special: bool, mode: Any) -> None:
    model, syntax = MODELS[dialect, has_special], syntax_of(dialect)
    names = NAMES if mode == "required" else frozenset({"get_weather"})
    tools = Tools(FUNCTIONS, mode, names, parallel=mode == "required")
    form = form_of(Wanted(syntax, tools, None, False, model.special))
    assert form is not None
    seen = []
    for seed in range(4):
        before = ""
        if dialect == "harmony":  # at random it would think on and on
            before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if seed % 2 else ""
            before += syntax.dialect.spelling.before
        output = model.draw(form.grammar, seed, before)
        found = read(syntax, tools, output)
        assert found.text == "" and found.calls, output
        check(found.calls, form)
        seen += [call.name for call, _ in found.calls]
        assert mode == "required" or (seen[-1:] == ["get_weather"] and len(found.calls) == 1)
    assert set(seen) <= names


@EVERY
def test_a_strict_tool_is_enforced_behind_a_free_text(dialect: str, has_special: bool) -> None:
    model, syntax = MODELS[dialect, has_special], syntax_of(dialect)
    tools = Tools(FUNCTIONS, "auto", NAMES)
    form = form_of(Wanted(syntax, tools, None, False, model.special))
    assert form is not None
    spelling = syntax.dialect.spelling
    text = "<|channel|>final<|message|>Hello < [x" if dialect == "harmony" else "Hello < [x"
    assert read(syntax, tools, model.draw(form.grammar, 1, text)).text.startswith("Hello < [x")
    free = "" if dialect in ("llama", "pythonic", "harmony") else "Well. "
    for seed in range(3):
        output = model.draw(form.grammar, seed, f"{free}{spelling.first}{spelling.before}")
        found = read(syntax, tools, output)
        assert found.calls, output
        assert found.text.startswith(free.strip())
        check(found.calls, form)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("has_special", [False, True])
def test_reasoning_may_come_first(is_open: bool, has_special: bool) -> None:
    syntax = syntax_of("mistral", "brackets")
    model = Model(syntax.marks if has_special else ())
    tools = Tools(FUNCTIONS, "required", NAMES)
    form = form_of(Wanted(syntax, tools, None, is_open, model.special))
    assert form is not None
    opened = "" if is_open else "[THINK]"
    output = model.draw(form.grammar, 1, f"{opened}Hm {{ [ so[/THINK]\n")
    found = read(syntax, tools, output, is_open)
    assert found.reasoning == "Hm { [ so" and found.calls
    if not is_open:
        assert read(syntax, tools, model.draw(form.grammar, 2, "[TOOL_CALLS]")).calls


@EVERY
def test_an_answer_with_a_form_is_the_form_or_a_call(dialect: str, has_special: bool) -> None:
    model, syntax = MODELS[dialect, has_special], syntax_of(dialect)
    schema = {"type": "object", "properties": {"name": {"type": "boolean"}}, "required": ["name"]}
    answer = structured.form_of(ResponseFormat("json_schema", JsonSchema("f", schema)), None)
    tools = Tools((FunctionTool("get_weather"), FUNCTIONS[1]), "auto", NAMES)
    form = form_of(Wanted(syntax, tools, answer, False, model.special))
    assert form is not None
    head = "<|channel|>final<|message|>" if dialect == "harmony" else ""
    found = read(syntax, tools, model.draw(form.grammar, 1, head + '{"name":t'))
    assert json.loads(found.text)["name"] in (True, False) and form.is_kept(found.text)
    spelling = syntax.dialect.spelling
    before = '{"name": "' if dialect == "pythonic" else spelling.first + spelling.before
    found = read(syntax, tools, model.draw(form.grammar, 1, f"{before}get_weather"))
    assert found.calls and isinstance(json.loads(found.calls[0][1]), dict)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_the_reasoning(is_open: bool, budget: int) -> None:
    syntax = syntax_of("hermes", "think")
    model = Model(["</think>"])
    form = form_of(Wanted(syntax, Tools(), None, is_open, model.special, budget, model.special["</think>"]))
    assert form is not None
    opened = "" if is_open else "<think>"
    output = model.draw(form.grammar, 1, f"{opened}{'a' * budget}", most=30 + budget)
    found = read(syntax, Tools(), output, is_open)
    assert found.reasoning == "a" * budget and output.count("</think>") == 1
    with pytest.raises(AssertionError):
        model.draw(form.grammar, 1, f"{opened}{'a' * (budget + 1)}")
    if budget > 3:
        early = read(syntax, Tools(), model.draw(form.grammar, 1, f"{opened}ab</think>Hi."), is_open)
        assert early.reasoning == "ab" and early.text.startswith("Hi.")


def test_a_budget_in_channels() -> None:
    syntax, model = syntax_of("harmony"), MODELS["harmony", True]
    form = form_of(Wanted(syntax, Tools(), None, False, model.special, 4, model.special["<|end|>"]))
    assert form is not None
    start = "<|channel|>analysis<|message|>"
    output = model.draw(form.grammar, 1, f"{start}abcd<|end|><|start|>assistant<|channel|>final<|message|>Hi")
    assert read(syntax, Tools(), output).reasoning == "abcd"
    with pytest.raises(AssertionError):
        model.draw(form.grammar, 1, f"{start}abcde")


def test_nothing_is_enforced_where_nobody_wants_it() -> None:
    tools = Tools((FunctionTool("f", None, {"type": "object", "not": {}}),), "auto", frozenset({"f"}))
    assert form_of(Wanted(syntax_of("hermes"), tools, None, False, {})) is None
    assert form_of(Wanted(syntax_of("hermes"), Tools(), None, False, {})) is None


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "tools[0].function.parameters/properties/a/not"),
        ({"type": "array"}, "tools[0].function.parameters"),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, "tools[0].function.parameters"),
        ({"enum": [{}]}, "tools[0].function.parameters"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(schema: Any, pointer: str) -> None:
    tools = Tools((FunctionTool("f", None, schema),), "required", frozenset({"f"}))
    with pytest.raises(ApiError) as caught:
        form_of(Wanted(syntax_of("hermes"), tools, None, False, {}))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_schema", pointer)


def test_128_tools_with_20_parameters_each_can_be_forced() -> None:
    known = {f"p{i}": {"type": "string" if i % 2 else "integer"} for i in range(20)}
    schema = {"type": "object", "properties": known, "required": ["p0"], "additionalProperties": False}
    functions = tuple(FunctionTool(f"tool_{i}", None, schema) for i in range(128))
    tools = Tools(functions, "required", frozenset(one.name for one in functions), parallel=False)
    form = form_of(Wanted(syntax_of("hermes"), tools, None, False, {}))
    assert form is not None
    assert read(syntax_of("hermes"), tools, MODELS["hermes", False].draw(form.grammar, 1)).calls


@pytest.mark.parametrize(
    "schema",
    [
        {},
        None,
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {"anyOf": [{"type": "object", "properties": {"a": {"type": "null"}}}, {"type": "object", "properties": {}}]},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}}, {"required": ["a"]}]},
    ],
)
def test_parameters_that_are_an_object_in_other_words_are_taken(schema: Any) -> None:
    tools = Tools((FunctionTool("now", None, schema),), "required", frozenset({"now"}))
    model = MODELS["hermes", False]
    form = form_of(Wanted(syntax_of("hermes"), tools, None, False, {}))
    assert form is not None
    assert read(syntax_of("hermes"), tools, model.draw(form.grammar, 3)).calls


def form_of_parameters(schema: Any) -> Form | None:
    tools = Tools((FunctionTool("now", None, schema),), "required", frozenset({"now"}))
    return form_of(Wanted(syntax_of("hermes"), tools, None, False, {}))


def doubling(keyword: str, leaf: Any, levels: int) -> Any:
    """A schema in which 2 to the power of `levels` ways lead to one leaf."""
    twice = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": twice | {f"d{levels}": leaf}}


@pytest.mark.parametrize("keyword", ["anyOf", "allOf"])
@pytest.mark.timeout(20)
def test_parameters_with_a_billion_ways_to_one_leaf_are_looked_at_once(keyword: str) -> None:
    with pytest.raises(ApiError, match="must be an object"):
        form_of_parameters(doubling(keyword, {"type": "string"}, 60))
    assert form_of_parameters(doubling(keyword, {"type": "object", "properties": {}}, 60)) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"anyOf": [{"type": "object"}, {"type": "object"}]}, {"type": "object"}]},
        {"allOf": [{"anyOf": [{"type": "object"}, {"type": "object", "properties": {}}]}, {"required": ["a"]}]},
    ],
)
def test_parameters_with_an_anyof_inside_of_an_anyof_or_allof_are_an_object(schema: Any) -> None:
    assert form_of_parameters(schema) is not None


def test_references_that_lead_too_deep_are_refused_with_a_sentence() -> None:
    def behind(number: int) -> Any:
        inner: Any = {"$ref": f"#/$defs/d{number + 1}"}
        for _ in range(12):
            inner = {"anyOf": [inner, {"type": "object"}]}
        return inner

    named = {f"d{i}": behind(i) for i in range(80)} | {"d80": {"type": "object"}}
    with pytest.raises(ApiError, match="lead too deep"):
        form_of_parameters({"$ref": "#/$defs/d0", "$defs": named})
