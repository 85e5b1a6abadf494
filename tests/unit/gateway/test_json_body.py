"""S2: what a body may cost is counted before it is decoded, and what parsers disagree about is still refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.base.errors import ApiError
from gateway.intake import json_body
from gateway.intake.json_body import WINDOW, decode_object


def refusal(body: bytes) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as refused:
        decode_object(body)
    assert refused.value.status == 400
    return refused.value.code, refused.value.message


FLOODS = {
    "keys": ("members", lambda: "{" + ", ".join(f'"k{i}": 1' for i in range(1_500_000)) + "}"),
    "ids": ("values", lambda: '{"prompt": [' + "123456, " * 1_999_999 + "123456]}"),
    "messages": ("objects", lambda: json.dumps({"messages": [{"role": "user", "content": "x"}] * 99_000})),
    "strings": ("values", lambda: '{"a":' + '"",' * 5_000_000),
    "quotes": ("values", lambda: "{" + '"' * 15_000_000),
    "colons": ("members", lambda: "{" + ":" * 15_000_000),
}
"""What there is too much of, and a body of it. Each is made by its test: every process imports this file."""


@pytest.mark.parametrize(("what", "body"), FLOODS.values(), ids=FLOODS)
def test_s2_a_flood_of_values_is_refused_before_it_is_decoded(
    what: str, body: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body.msgspec.json, "decode", lambda _: pytest.fail("decoded"))
    code, message = refusal(body().encode())
    assert code == "too_many_values"
    assert what in message


def test_s2_the_largest_prompts_that_models_can_take_are_decoded() -> None:
    ids = {"prompt": [131_071] * 262_144}
    assert decode_object(json.dumps(ids).encode()) == ids
    messages = {"messages": [{"role": "user", "content": "a, b: [c] {d}"}] * 10_000}
    assert decode_object(json.dumps(messages).encode()) == messages
    text = {"prompt": '{"a": [1, "\\"]}' * 100_000}
    assert decode_object(json.dumps(text).encode()) == text


@pytest.mark.parametrize("shift", range(12))
@pytest.mark.parametrize("inner", ['-0 "', "\\\\\\", '","b":', "[[", 'x"y\\"z'])
def test_what_stands_in_a_string_is_no_structure_wherever_a_window_ends(shift: int, inner: str) -> None:
    value = {"a": "x" * (WINDOW - 20 + shift) + inner, "b": [{"c": inner}]}
    assert decode_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize("shift", range(6))
@pytest.mark.parametrize("number", ["-0", "18446744073709551616", "-9223372036854775809"])
def test_numbers_that_parsers_disagree_about_are_refused_wherever_a_window_ends(shift: int, number: str) -> None:
    filler = " " * (WINDOW - 10 + shift)
    assert refusal(f'{{"a":{filler}{number}}}'.encode())[0] == "invalid_json"
    assert refusal(f'{{"a":[1,{{"b":[{number} ]}}]}}'.encode())[0] == "invalid_json"


def test_numbers_that_only_begin_like_a_negative_zero_are_taken() -> None:
    body = b'{"a": [-0.5, -0.0, -0e1, 1e-05, -10], "b-0 ": "-0 "}'
    assert decode_object(body) == json.loads(body)


@pytest.mark.parametrize("shift", range(8))
@pytest.mark.parametrize("number", ["1e-0", "-2.5E-0", "10e-00"])
def test_an_exponent_may_be_a_negative_zero_wherever_a_window_ends(shift: int, number: str) -> None:
    filler = " " * (WINDOW - 12 + shift)
    body = f'{{"a":{filler}{number},"b":[{number}]}}'.encode()
    assert decode_object(body) == json.loads(body)


@pytest.mark.parametrize(
    "body", ['{"a":1,"a":2}', '{"a":{"b":1,"\\u0062":2}}', '{"x":[1,[{"a":{},"a":{}}]]}', '{"a":1,"a":1}']
)
def test_a_key_that_comes_twice_is_refused_at_any_depth(body: str) -> None:
    code, message = refusal(body.encode())
    assert code == "invalid_json"
    assert "twice" in message


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [131_071] * 300_000},
        {"prompt": [[7] * 3_000] * 100},
        {"prompt": [["word"] * 30] * 3_000, "n": 1},
        {"a": {"b": {"c": [1.5, None, True, -3] * 60_000}}},
        {"logit_bias": {str(number): 1 for number in range(60_000)}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 9_000},
    ],
    ids=["ids", "prompts", "words", "deep", "members", "messages"],
)
def test_no_call_decodes_more_than_two_windows(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call holds the interpreter lock: 390,000 token ids stopped the loop for 9 ms on a machine at rest, and 60,000
    members for 10 ms beside an engine.
    """
    decode, sizes = msgspec.json.decode, []

    def noted(text: bytes) -> object:
        sizes.append(len(text))
        return decode(text)

    monkeypatch.setattr(json_body.msgspec.json, "decode", noted)
    assert decode_object(json.dumps(value).encode()) == value
    assert max(sizes) <= 2 * WINDOW


def decoded(body: bytes, window: int) -> object:
    """What a body is decoded to in windows of some bytes, or None if it is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "WINDOW", window)
        try:
            return decode_object(body)
        except ApiError:
            return None


LEAVES = st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63) | st.text(max_size=8)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner))


@settings(max_examples=40)  # to draw a tree takes longer than to decode it
@given(value=st.dictionaries(st.text(max_size=3), TREES), indent=st.sampled_from([None, 1]), window=st.integers(2, 9))
def test_pieces_are_decoded_as_the_whole_is(value: dict[str, object], indent: int | None, window: int) -> None:
    body = json.dumps(value, indent=indent).encode()
    assert decoded(body, window) == value


@settings(max_examples=300)
@given(text=st.text(alphabet='1a,[] {}":-\\', max_size=24), window=st.integers(2, 9))
def test_what_is_refused_as_a_whole_is_refused_in_pieces(text: str, window: int) -> None:
    for body in (text.encode(), b'{"a":[' + text.encode() + b"]}", b'{"a":{"b":1,' + text.encode() + b"}}"):
        assert decoded(body, window) == decoded(body, WINDOW)


@pytest.mark.parametrize("window", range(2, 10))
@pytest.mark.parametrize(
    "body",
    [
        '{"a":[1,2],"b":0,"a":[3,4]}',
        '{"a":[1,2],"b":{},"a":{"c":[3,4]}}',
        '{"a":{"c":1},"b":{},"a":{"d":{"e":1,"f":2}}}',
        '{"a":[],"b":[],"a":[[1,2],3]}',
        '{"a":1,"a":1,"a":1}',
    ],
)
def test_a_key_that_comes_twice_is_refused_wherever_its_value_is_cut(body: str, window: int) -> None:
    assert decoded(body.encode(), window) is None


@pytest.mark.parametrize("window", range(2, 10))
@pytest.mark.parametrize("hole", ["[1,{}, 2]", "[{},1]", "[1,{}]", '[{{"b":1,{}}}]', "[[{},1],2]", "[1,[2,{}],3]"])
def test_a_value_that_is_missing_at_a_cut_is_refused(hole: str, window: int) -> None:
    for filler in ("", " " * window, " " * 3 * window):
        assert decoded(f'{{"a":{hole.format(filler)}}}'.encode(), window) is None
