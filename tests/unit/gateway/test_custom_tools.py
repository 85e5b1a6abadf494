"""Tools of the type `custom`: their schema, and the text that is read out of the arguments of their calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load import stretched

from gateway.base.errors import ApiError
from gateway.schema.custom_tools import InputText, arguments_of
from gateway.schema.tools import read_tools


def custom(**more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f"} | more}


def regex(definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": "regex", "definition": definition}}


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.sampled_from(["", " ", "\n  "]), st.data())
def test_the_text_is_read_however_the_arguments_are_written_and_cut(
    text: str, is_ascii: bool, space: str, data: st.DataObject
) -> None:
    written = f'{{{space}"input"{space}:{space}{json.dumps(text, ensure_ascii=is_ascii)}{space}}}'
    cuts = data.draw(st.lists(st.integers(0, len(written)), max_size=8).map(sorted))
    reader, found = InputText(), ""
    for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True):
        found += reader.push(written[start:end])
    assert found == text
    assert json.loads(arguments_of(text)) == {"input": text}


def test_the_text_comes_as_it_is_written() -> None:
    reader = InputText()
    assert [reader.push(piece) for piece in ('{"in', 'put": "a', "b\\", "n\\u00", "e9", '"}', "x")] == [
        *("", "a", "b", "\n", "é", "", "")
    ]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("\\ud83d\\ude00", "😀"),
        ("\\ud83d", "\ufffd"),
        ("\\ud83dx", "\ufffdx"),
        ("\\ud83d\\n", "\ufffd\n"),
        ("\\ude00", "\ufffd"),
        ("\\ud83d\\u0041", "\ufffdA"),
        ("\\uzzzz", "\ufffd"),
        ("\\/\\\\", "/\\"),
    ],
)
def test_escapes_that_no_text_has_are_replaced(written: str, text: str) -> None:
    for step in (1, 3, 100):
        reader, whole = InputText(), f'{{"input": "{written}"}}'
        assert "".join(reader.push(whole[i : i + step]) for i in range(0, len(whole), step)) == text


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        ("a+", "aa", "ab"),
        ("^a+$", "aa", "xaa"),
        ("a|b", "b", "ab"),
        ("^(?:yes|no)$", "no", "nope"),
        (r"a\$", "a$", "a"),
        (r"[|]x", "|x", "x"),
        (r"(?P<day>\d\d) May", "12 May", "1 May"),
    ],
)
def test_an_expression_is_of_the_whole_text(definition: str, good: str, bad: str) -> None:
    tools = read_tools([custom(format=regex(definition))], None, None)
    assert tools.custom == {"f"}
    (function,) = tools.functions
    assert function.strict
    pattern = tools.schema_of("f")["properties"]["input"]["pattern"]
    assert re.search(pattern, good)
    assert not re.search(pattern, bad)


@pytest.mark.parametrize(
    ("tool", "param", "code"),
    [
        ({"type": "custom"}, "tools[0].custom", "missing_required_parameter"),
        ({"type": "custom", "function": {"name": "f"}}, "tools[0].custom", "missing_required_parameter"),
        (custom(name="a b"), "tools[0].custom.name", "invalid_value"),
        (custom(format={"type": "json"}), "tools[0].custom.format.type", "invalid_value"),
        (custom(format={"type": "grammar"}), "tools[0].custom.format.grammar", "missing_required_parameter"),
        (
            custom(format={"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /(?=a)/"}}),
            "tools[0].custom.format.grammar.definition",
            "unsupported_schema",
        ),
        (custom(format=regex("(?=a)b")), "tools[0].custom.format.grammar.definition", "unsupported_schema"),
        (custom(format=regex("(")), "tools[0].custom.format.grammar.definition", "unsupported_schema"),
        ({"type": "web_search"}, "tools[0].type", "unsupported_parameter"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(tool: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as fault:
        read_tools([tool], None, None)
    assert (fault.value.param, fault.value.code, fault.value.status) == (param, code, 400)


CHAIN, CLASSES = range(480), "[!-\uffff]" * 3000


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("lark", f"start: /{CLASSES}/"),
        ("lark", f"start: /(?i:{CLASSES})/"),
        ("lark", "start: r0\n" + "".join(f'r{i}: r{i + 1} "xxxxxx"\n' for i in CHAIN) + 'r480: "a"'),
        ("lark", f'start: "{"x" * 9000}" r0\n' + "".join(f"r{i}: r{i + 1}\n" for i in CHAIN) + 'r480: "a"'),
        ("regex", "[" * 16_000),
    ],
    ids=["classes", "classes without case", "chain", "chain behind a long text", "brackets"],
)
def test_the_largest_definition_is_read_in_a_moment(syntax: str, definition: str) -> None:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    begun = time.thread_time()
    with suppress(ApiError):
        read_tools([custom(format=form)], None, None)
    assert time.thread_time() - begun < stretched(0.4)


def test_lark_grammars_are_bounded_together() -> None:
    definition = "start: /" + "x" * 16_000 + "/"
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}
    tools = [custom(name=f"f{i}", format=form) for i in range(5)]
    assert len(read_tools(tools[:4], None, None).grammars) == 4
    with pytest.raises(ApiError) as fault:
        read_tools(tools, None, None)
    assert (fault.value.param, fault.value.code, fault.value.status) == ("tools", "unsupported_schema", 400)


QUIET = """
from gateway.structured import terminal
for pattern in ("[[]", "[a~~b]", "[a&&b]", "[a||b]", "[b[]"):
    terminal.read(pattern)
"""


def test_a_class_that_python_may_read_otherwise_one_day_is_no_news() -> None:
    """In a process of its own, because the tests make an error of every warning, and set that anew for each test."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", QUIET], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ({"type": "custom", "custom": {"name": "f"}}, "named"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [custom()]}}, "required"),
    ],
)
def test_a_custom_tool_can_be_chosen(choice: dict[str, Any], mode: str) -> None:
    other = {"type": "function", "function": {"name": "g"}}
    tools = read_tools([custom(), other], choice, None)
    assert (tools.mode, tools.allowed, tools.custom) == (mode, {"f"}, {"f"})
