"""Which schemas are enforced, and where a refusal points."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from itertools import product

import pytest
from load import stretched
from walks import matches

from gateway.base.errors import ApiError
from gateway.structured import soundness
from gateway.structured.form import MAX_BYTES, JsonSchema, ResponseFormat, StructuredOutputs, form_of
from gateway.structured.read_schema import MAX_NAMED


def of_schema(schema):
    return form_of(ResponseFormat("json_schema", JsonSchema("x", schema)), None)


def refusal(schema):
    with pytest.raises(ApiError) as caught:
        of_schema(schema)
    assert caught.value.status == 400
    return caught.value


STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "number", "multipleOf": 0}, "/multipleOf"),
        ({"type": "number", "multipleOf": "2"}, "/multipleOf"),
        ({"type": "number", "multipleOf": 0.07}, "/multipleOf"),
        ({"type": "number", "multipleOf": 1e-300}, "/multipleOf"),
        ({"type": "number", "minimum": 1e-30}, "/minimum"),
        ({"type": "number", "maximum": 1e300}, "/maximum"),
        ({"type": "number", "maximum": 10**400}, "/maximum"),
        ({"type": "number", "exclusiveMaximum": True}, "/exclusiveMaximum"),
        ({"type": "number", "minimum": 2, "exclusiveMaximum": 2}, ""),
        ({"const": 2**53 + 1}, "/const"),
        ({"enum": [1, {"a": [10**400]}]}, "/enum"),
        ({"enum": ["a\x00b"]}, "/enum"),
        ({"properties": {"\x7f": STRING}}, "/properties"),
        ({"allOf": [{"multipleOf": 499}, {"multipleOf": 497}]}, ""),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"not": {}}], "$defs": {"a": STRING}}, "/allOf/1/not"),
        ({"allOf": []}, "/allOf"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"type": "array", "items": STRING, "contains": STRING}, "/contains"),
        ({"type": "object", "patternProperties": {"a": STRING}}, "/patternProperties"),
        ({"properties": {"a/b": {"not": STRING}}}, "/properties/a~1b/not"),
        ({"if": STRING}, "/if"),
        ({"type": "object", "dependentRequired": {}}, "/dependentRequired"),
        ({"type": "object", "minProperties": 1}, "/minProperties"),
        ({"$ref": "https://example.com/x.json"}, "/$ref"),
        ({"$ref": "#/$defs/none"}, "/$ref"),
        ({"oneOf": [STRING, {"type": ["string", "null"]}]}, "/oneOf"),
        ({"oneOf": [{"const": 1}, {"type": "integer"}]}, "/oneOf"),
        ({"type": "string", "minimum": 1}, "/minimum"),
        ({"type": "string", "pattern": "a", "multipleOf": 3}, "/multipleOf"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "/required/0"),
        ({"type": "string", "pattern": "(?=a)"}, "/pattern"),
        ({"type": "string", "pattern": r"(a)\1"}, "/pattern"),
        ({"type": "string", "format": "color"}, "/format"),
        ({"type": "text"}, "/type"),
        ({"type": []}, "/type"),
        ({"type": ["string", {}]}, "/type"),
        ({"enum": []}, "/enum"),
        ({"enum": ["a"], "type": "integer"}, "/enum"),
        ({"type": "integer", "minimum": 5, "exclusiveMaximum": 5}, ""),
        ({"type": "string", "minLength": 4, "maxLength": 3}, "/minLength"),
        ({"type": "array", "items": False, "minItems": 1}, "/minItems"),
        ({"type": "array", "maxItems": 1_000_000}, "/maxItems"),
        ({"items": [STRING]}, "/items"),
        (False, ""),
        (7, ""),
        ({"$ref": "#"}, ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, STRING]}}}, "/$defs/a"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_cannot_be_enforced_is_refused_with_its_pointer(schema, pointer):
    fault = refusal(schema)
    assert (fault.code, fault.param) == ("unsupported_schema", "response_format.json_schema.schema" + pointer)


@pytest.mark.parametrize(
    ("wanted", "outputs", "name", "place"),
    [
        (ResponseFormat("json_schema", JsonSchema("x"), {"minItems": -1}), None, "", "response_format.schema"),
        (ResponseFormat("json_object", None, {"minItems": -1}), None, "", "response_format.schema"),
        (None, {"minItems": -1}, "", "structured_outputs.json"),
        (None, '{"minItems": -1}', "json_schema", "json_schema"),
    ],
)
def test_a_pointer_stands_behind_the_path_of_its_schema(wanted, outputs, name, place):
    """It was the pointer alone, which no body has as a path."""
    with pytest.raises(ApiError) as caught:
        form_of(wanted, outputs and StructuredOutputs(json=outputs), name)
    assert (caught.value.code, caught.value.param) == ("unsupported_schema", place + "/minItems")


def deep(levels):
    schema = STRING
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        deep(17),
        {"properties": {f"p{i}": {} for i in range(513)}},
        {"properties": {"a": {"properties": {f"p{i}": {} for i in range(512)}}}},
        {"enum": ["x" * 100] * 700},
        {"description": "x" * 66_000},
        {"properties": {"x" * 300: {}}},
        {
            "anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(MAX_NAMED + 1)],
            "$defs": {str(i): {} for i in range(MAX_NAMED + 1)},
        },
        {"oneOf": [{"properties": {"a": {"const": i}}, "required": ["a"]} for i in range(200)]},
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(300)}},
    ],
    ids=["depth", "properties", "nested-properties", "enum", "bytes", "name", "references", "oneOf", "chain"],
)
def test_a_hostile_schema_is_refused(schema):
    assert refusal(schema).code == "unsupported_schema"


@pytest.mark.parametrize("schema", [deep(16), {"properties": {f"p{i}": {} for i in range(512)}}, {}, True])
def test_a_schema_at_the_limits_is_taken(schema):
    assert matches(of_schema(schema).grammar, "1") == (schema in ({}, True))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "integer", "minimum": -12, "exclusiveMaximum": 305},
            ["-12", "0", "99", "304"],
            ["-13", "305", "00", "1.0", "+1"],
        ),
        ({"type": ["integer", "null"]}, ["0", "-7", "null"], ["1.5", '"a"']),
        ({"type": "number"}, ["1.5", "-2e-3", "0"], ["01", ".5", "1.", "NaN"]),
        ({"type": "string", "maxLength": 2}, ['""', '"é\\n"', '"\\""'], ['"abc"', '"\n"', "a"]),
        ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"', '""']),
        ({"type": "string", "pattern": '^"\\d$'}, ['"\\"7"'], ['""7"', '"x\\"7"', '"\\"77"']),
        ({"enum": [1, "a", {"k": [None, True]}]}, ["1", '"a"', '{"k": [null, true]}'], ["2", '"1"']),
        ({"enum": [1, "a"], "type": "string"}, ['"a"'], ["1"]),
        ({"enum": [1.0, 2, 2.5], "type": "integer"}, ["1", "2"], ["1.0", "2.5"]),
        ({"const": 1.0, "type": "integer"}, ["1"], ["1.0", "2"]),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
            ["[true]", "[true,false]", "[true, false]"],
            ["[]", "[true,true,true]", "[ true]", "[true,  true]"],
        ),
        (
            {"prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}},
            ["[]", "[1]", "[1,2]", "[1,2,3,3]"],
            ["[2]", "[1,3]"],
        ),
        (
            {"prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 1},
            ["[1]", "[1,2]"],
            ["[]", "[1,2,3]"],
        ),
        (
            {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b"]},
            ['{"b":2}', '{"a": 1, "b": 2}', '{"b":2,"c":3}', '{"a":1,"b":2,"c":3}'],
            ["{}", '{"a":1}', '{"b":2,"a":1}', '{"b":2,"d":1}', '{"b":2,"b":2}', '{"b":2,}'],
        ),
        (
            {"properties": {"ab": {"const": 1}}, "additionalProperties": {"const": 2}},
            ["{}", '{"ab":1}', '{"ab":1,"a":2,"abc":2,"":2}', '{"x":2}'],
            ['{"ab":2}', '{"ab":1,"ab":2}', '{"\\u0061b":2}'],
        ),
        ({"type": "object"}, ["{}", '{"a":[1,{"b":null}]}'], ["[]", '{"a"}']),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ['""', "null"], ["1"]),
        (
            {
                "oneOf": [
                    {"properties": {"t": {"const": "a"}}, "required": ["t"]},
                    {"properties": {"t": {"const": "b"}, "x": {}}, "required": ["t"]},
                ]
            },
            ['{"t":"a"}', '{"t":"b","x":1}'],
            ['{"t":"a","x":1}', "{}"],
        ),
        ({"allOf": [{"$ref": "#/definitions/a"}], "definitions": {"a": {"const": "x"}}}, ['"x"'], ['"y"']),
        (
            {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
            ['{"next":null}', '{"next":{"next":null}}'],
            ["{}", '{"next":1}'],
        ),
        ({"type": "string", "format": "date"}, ['"2024-12-31"'], ['"2024-02-30"', '"24-1-1"']),
        ({"type": "string", "format": "ipv4"}, ['"10.0.255.1"'], ['"10.0.256.1"']),
        ({"type": "string", "format": "ipv6"}, ['"::1"', '"fe80::"', '"1:2:3:4:5:6:7:8"'], ['"1:2"', '":"']),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_schema_lets_through_what_satisfies_it(schema, good, bad):
    form = of_schema(schema)
    for text in good:
        assert matches(form.grammar, text) and form.is_kept(text), text
    for text in bad:
        assert not matches(form.grammar, text), text


@pytest.mark.parametrize(
    ("outputs", "good", "bad"),
    [
        ({"regex": r"(a|bc){2,3}\d+[^x\-]?"}, ["aa1", "abcbc77é"], ["a1", "aa", "aa1x"]),
        ({"regex": r"^\(\w+\)$|z"}, ["(a_1)", "z"], ["()", "zz"]),
        ({"choice": ["yes", "no", 'a"\\\né']}, ["yes", "no", 'a"\\\né'], ["y", "yesno"]),
        ({"grammar": 'root ::= n ("+" n)*\nn ::= [0-9]+'}, ["1+22"], ["1+", "+"]),
        ({"json_object": True}, ['{"a":1}'], ["1"]),
        ({"json": '{"type": "null"}'}, ["null"], ["1"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_other_forms_let_through_what_they_say(outputs, good, bad):
    form = form_of(None, StructuredOutputs(**outputs))
    for text in good:
        assert matches(form.grammar, text) and form.is_kept(text), text
    for text in bad:
        assert not matches(form.grammar, text), text


@pytest.mark.parametrize(
    ("outputs", "code"),
    [
        ({}, "invalid_value"),
        ({"regex": "a", "choice": ["a"]}, "invalid_value"),
        ({"choice": []}, "invalid_value"),
        ({"choice": ["a", ""]}, "invalid_value"),
        ({"choice": ["a"] * 1025}, "invalid_value"),
        ({"json_object": False}, "invalid_value"),
        ({"regex": r"(?<!a)b"}, "unsupported_schema"),
        ({"regex": r"(?i)b"}, "unsupported_schema"),
        ({"regex": r"a\b"}, "unsupported_schema"),
        ({"regex": "(" * 70 + ")" * 70}, "unsupported_schema"),
        ({"regex": "(" * 60_000}, "unsupported_schema"),
        ({"regex": "a{1,99999}"}, "unsupported_schema"),
        ({"regex": "a)"}, "unsupported_schema"),
        ({"regex": "[b-a]"}, "unsupported_schema"),
        ({"regex": "x" * 70_000}, "unsupported_schema"),
        ({"grammar": "hello"}, "unsupported_schema"),
        ({"grammar": 'root ::= "a"' + " " * 70_000}, "unsupported_schema"),
        ({"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000}, "unsupported_schema"),
        ({"json": "{"}, "unsupported_schema"),
        ({"json": "[" * 30_000}, "unsupported_schema"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_form_that_cannot_be_is_refused(outputs, code):
    with pytest.raises(ApiError) as caught:
        form_of(None, StructuredOutputs(**outputs))
    assert caught.value.code == code
    assert caught.value.param.startswith("structured_outputs")


def test_two_forms_at_once_are_refused():
    with pytest.raises(ApiError):
        form_of(ResponseFormat("json_object"), StructuredOutputs(choice=["a"]))


def test_many_oneofs_cost_together_no_more_comparisons_than_one_may(monkeypatch):
    compared = []
    plain = soundness._exclude
    monkeypatch.setattr(soundness, "_exclude", lambda *given: compared.append(1) or plain(*given))
    strings = {f"s{i}": {"anyOf": [{"$ref": f"#/$defs/s{i + 1}"}] * 2} for i in range(6)} | {"s6": STRING}
    branches = [{"$ref": "#/$defs/s0"}, {"anyOf": [{"type": "null"}, {"type": "integer"}]}]
    assert of_schema({"type": "array", "prefixItems": [{"oneOf": branches}], "$defs": strings})
    assert len(compared) > 100
    compared.clear()
    refused = refusal({"type": "array", "prefixItems": [{"oneOf": branches}] * 500, "$defs": strings})
    assert "exclude each other" in refused.message
    assert len(compared) < 2 * soundness.MAX_COMPARISONS


def enum_of(first: int) -> dict[str, list[int]]:
    return {"enum": list(range(first, 8_000, 2))}


def spellings(num_tildes: int) -> list[str]:
    """Returns JSON pointers that all name a property of this many tildes."""
    return ["".join(one) for one in product(("~", "~0"), repeat=num_tildes)]


def quick(schema: object) -> None:
    """Accepts or refuses a schema, in a bounded time."""
    size = len(json.dumps(schema))
    assert size <= MAX_BYTES or size > 2**20, "it is refused by its size alone"
    began = time.thread_time()
    with suppress(ApiError):
        of_schema(schema)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [enum_of(1), enum_of(2)]},
        {
            "oneOf": [{"anyOf": [{"$ref": "#/$defs/a"}] * 1000}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"enum": [1] * 6000}, "b": {"enum": [2] * 7000}},
        },
        {"oneOf": [enum_of(1), *[{"enum": [2 * i]} for i in range(1000)]]},
        {
            "oneOf": [{"anyOf": [{"$ref": "#/$defs/a"}] * 100}] * 2,
            "$defs": {"a": {"type": "object", "required": [f"p{i}" for i in range(512)]}},
        },
        {"allOf": [{"exclusiveMinimum": 1}] * 1400 + [{"maximum": 9}] * 1400},
        {"allOf": [{"exclusiveMaximum": 9}] * 1400 + [{"minimum": 1}] * 1400},
        {
            "anyOf": [{"$ref": f"#/$defs/{one}"} for one in spellings(8)[:250]],
            "$defs": {"~" * 8: {"anyOf": [{}] * 13_000}},
        },
        {"anyOf": [{"$ref": f"#/$defs/a/{i}"} for i in range(200)], "$defs": {"a": [{}] * 200 + [1] * 19_000}},
        {"anyOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": {"anyOf": [{}] * 16_000}}},
        {
            "anyOf": [{"$ref": "#/$defs/0"}] * 1300,
            "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 4} for i in range(254)} | {"254": STRING},
        },
        {"enum": list(range(500_000))},
        {"anyOf": [{"$ref": "#"}] * 300_000},
    ],
    ids=[
        *("large-enums", "enums-again-and-again", "an-enum-and-many", "required", "exclusive-minima"),
        *("exclusive-maxima", "one-place-by-many-names", "a-long-list", "many-nodes", "a-chain-of-references"),
        *("megabytes-of-values", "megabytes-of-references"),
    ],
)
def test_a_hostile_schema_takes_a_bounded_time(schema):
    quick(schema)


def test_large_lists_of_values_that_exclude_each_other_are_branches():
    form = of_schema({"oneOf": [enum_of(1), enum_of(2)]})
    assert form.is_kept("7")
    assert "exclude each other" in refusal({"oneOf": [enum_of(1), {"enum": [2, 7]}]}).message
    assert "exclude each other" in refusal({"oneOf": [{"enum": [True, "a"]}, {"enum": [1, "a"]}]}).message
    assert "exclude each other" in refusal({"oneOf": [{"enum": [[1]]}, {"enum": [[2]]}]}).message


def test_one_place_by_many_names_is_refused():
    names = [{"$ref": f"#/$defs/{one}"} for one in spellings(6)]
    refused = refusal({"anyOf": names, "$defs": {"~" * 6: {"enum": list(range(2000))}}})
    assert "KiB together" in refused.message


def test_a_second_look_at_a_text_takes_a_bounded_time():
    """A schema of many branches and a list of many items would hold the gateway's loop for seconds."""
    far = [{"type": "integer", "minimum": 10**9 + i} for i in range(1000)]
    form = of_schema({"type": "array", "items": {"anyOf": [*far, {"type": "integer", "maximum": 10**6}]}})
    text = json.dumps(list(range(1000, 2000)))
    began = time.thread_time()
    assert form.is_kept(text)
    assert time.thread_time() - began < stretched(0.1)
    assert not form.is_kept('["a"]'), "what is small is still looked at"
    assert of_schema({"type": "array"}).is_kept("[" + "1," * 20_000), "what is too long is as the grammar made it"


def test_a_text_that_is_nested_too_deep_for_a_second_look_counts_as_its_grammar_made_it():
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    assert of_schema(schema).is_kept("[" * 5000 + "]" * 5000)
