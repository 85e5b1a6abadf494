"""The table of parameters agrees with the structs, and bodies are read by it."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from gateway.base.errors import ApiError
from gateway.routes.tokenize import DetokenizeFields, TokenizeFields
from gateway.schema import chat, completions, parameters
from gateway.schema.chat import ChatFields
from gateway.schema.completions import CompletionFields
from gateway.schema.parameter_table import PARAMETERS, Endpoint, Parameter
from gateway.schema.sampling import StreamOptions, outputs_of
from gateway.structured.form import JsonSchema, ResponseFormat, StructuredOutputs

BODIES: dict[Endpoint, type[msgspec.Struct]] = {
    "chat": ChatFields,
    "completions": CompletionFields,
    "tokenize": TokenizeFields,
    "detokenize": DetokenizeFields,
}
PARTS: dict[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchema,
    "structured_outputs": StructuredOutputs,
}
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "m", "prompt": "hi"},
    "tokenize": {"model": "m", "prompt": "hi"},
    "detokenize": {"model": "m", "tokens": [1]},
}
ROWS = [pytest.param(one, where, id=f"{where}-{one.path}") for one in PARAMETERS for where in one.endpoints]


def read(endpoint: str, **more: Any) -> tuple[Any, list[str]]:
    body = LEAST[endpoint] | more
    if endpoint == "chat":
        return chat.read(body)
    if endpoint == "completions":
        return completions.read(body)
    return parameters.read(body, BODIES[endpoint], endpoint)  # type: ignore[index]


def nested(path: str, item: Any) -> dict[str, Any]:
    """The body that has `item` at the path, with what its object needs beside it."""
    parent, _, name = path.rpartition(".")
    if parent == "response_format":
        return {parent: {"type": "json_schema", "json_schema": {"name": "x"}} | {name: item}}
    if parent == "response_format.json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x"} | {name: item}}}
    return {parent: {name: item}} if parent else {name: item}


def refusal(endpoint: str, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as found:
        read(endpoint, **more)
    return found.value


def names(endpoint: Endpoint, parent: str = "") -> set[str]:
    rows = [one for one in PARAMETERS if endpoint in one.endpoints and one.treatment == "honoured"]
    return {one.path.rpartition(".")[2] for one in rows if one.path.rpartition(".")[0] == parent}


@pytest.mark.parametrize("endpoint", get_args(Endpoint))
def test_what_the_table_honours_are_the_fields_of_the_body(endpoint: Endpoint) -> None:
    assert names(endpoint) == set(BODIES[endpoint].__struct_fields__)


@pytest.mark.parametrize("parent", PARTS)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_the_table_honours_are_the_fields_of_each_part(endpoint: Endpoint, parent: str) -> None:
    fields = {field.encode_name for field in msgspec.structs.fields(PARTS[parent])}
    described = {one.path.rpartition(".")[2] for one in PARAMETERS if one.path.startswith(f"{parent}.")}
    assert names(endpoint, parent) <= fields <= described


def test_no_parameter_stands_twice_for_an_endpoint() -> None:
    pairs = [(one.path, where) for one in PARAMETERS for where in one.endpoints]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(("row", "endpoint"), ROWS)
def test_a_parameter_that_is_switched_off_is_never_refused(row: Parameter, endpoint: str) -> None:
    if row.path in {*LEAST[endpoint], "response_format.type", "response_format.json_schema.name"}:
        return
    for item in (None, False, "", [], {}, *row.off):
        if row.is_off(item):
            read(endpoint, **nested(row.path, item))


@pytest.mark.parametrize(("row", "endpoint"), [one for one in ROWS if one.values[0].treatment == "refused"])
def test_what_is_refused_is_named(row: Parameter, endpoint: str) -> None:
    if row.path == "messages":
        return
    error = refusal(endpoint, **nested(row.path, "asked for"))
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", row.path)
    assert f"'{row.path}'" in error.message and row.note in error.message


@pytest.mark.parametrize(("row", "endpoint"), [one for one in ROWS if one.values[0].treatment == "no effect"])
def test_what_has_no_effect_is_not_named_as_ignored(row: Parameter, endpoint: str) -> None:
    samples = (True, 3, "text", ["text"], {"key": "text"})
    for item in samples:
        try:
            _, ignored = read(endpoint, **nested(row.path, item))
        except ApiError as error:
            refused = (error.code, (error.param or "").startswith(row.path))
            assert refused == ("invalid_type", True)
        else:
            assert not ignored
            return
    raise AssertionError("nothing is accepted")


@pytest.mark.parametrize("name", ["user", "safety_identifier"])
def test_the_name_of_an_end_user_is_bounded(name: str) -> None:
    """It is in no prompt, so one of megabytes was stored with a response and sent back."""
    error = refusal("chat", **{name: "x" * 1025})
    assert (error.param, error.code) == (name, "invalid_value")
    read("chat", **{name: "x" * 1024})


def test_unknown_parameters_are_named_one_level_down_too() -> None:
    _, ignored = read("chat", zebra=1, stream=True, stream_options={"lion": 1, "include_usage": True}, nothing=None)
    assert ignored == ["zebra", "stream_options.lion"]


def test_a_default_that_is_true_is_switched_off_by_false() -> None:
    fields, _ = read("chat", skip_special_tokens=False, add_generation_prompt=False)
    assert fields.skip_special_tokens is False and fields.add_generation_prompt is False
    assert read("chat", skip_special_tokens=True)[0].skip_special_tokens is None


def test_true_is_not_one() -> None:
    assert refusal("chat", n_cmpl=True).param == "n_cmpl"
    assert refusal("chat", mirostat=True).param == "mirostat"
    read("chat", n_cmpl=1, mirostat=0, repeat_penalty=1)


def test_an_empty_value_that_means_something_is_not_dropped() -> None:
    assert refusal("chat", web_search_options={}).param == "web_search_options"
    assert read("chat", json_schema={})[0].json_schema == {}
    assert read("chat", metadata={})[0].metadata == {}
    assert refusal("chat", model="").param == "model"


def test_there_is_one_form_at_most() -> None:
    for one, other in ((("regex", "a"), ("ebnf", "b")), (("grammar", "a"), ("structured_outputs", {"regex": "b"}))):
        fields, _ = read("completions", **dict([one, other]))
        with pytest.raises(ApiError, match="cannot be combined"):
            outputs_of(fields)


def test_defaults_of_a_beam_search_are_no_sampling() -> None:
    neutral = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0}
    read("chat", use_beam_search=True, n=3, **neutral)
    assert refusal("chat", use_beam_search=True, n=3, top_p=0.9).param == "top_p"
    assert refusal("chat", use_beam_search=True, n=9).param == "n"
    read("chat", n=128)
    assert refusal("chat", n=129).param == "n"


def test_a_length_penalty_of_one_needs_no_search() -> None:
    read("chat", length_penalty=1.0)
    assert refusal("chat", length_penalty=1.5).param == "length_penalty"


def test_completions_take_chats_name_of_the_bound_too() -> None:
    """guidellm sends both names."""
    fields, _ = completions.read({"model": "m", "prompt": "hi", "max_tokens": 5, "max_completion_tokens": 7})
    assert fields.max_output == 7
    fields, _ = completions.read({"model": "m", "prompt": "hi", "max_completion_tokens": None})
    assert fields.max_output == completions.DEFAULT_MAX_TOKENS
