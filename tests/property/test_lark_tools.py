"""Inputs of custom tools under a Lark grammar: whatever is drawn, Lark's own parser reads it."""

from __future__ import annotations

import json
import random
import re

import pytest
from lark import Lark
from lark.exceptions import LarkError as NotRead
from walks import END, VOCABULARY, automaton, matches, tokens_of

from gateway.base.errors import ApiError
from gateway.parsers.dialects import OutputSyntax
from gateway.parsers.forced import Wanted, form_of
from gateway.schema.tools import Tools, read_tools

ARITHMETIC = r"""
start: expr
expr: term (SP ADD SP term)* -> add
| term
term: factor (SP MUL SP factor)* -> mul
| factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
"""The example of OpenAI's guide for custom tools."""
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
GRAMMARS = {
    "arithmetic": (ARITHMETIC, ["4 + 4", "1 * 23 + 4"], ["4+4", "4 +", ""]),
    "calls": (
        '?start: value\nvalue: NAME "(" [value ("," value)*] ")" | ESCAPED_STRING | SIGNED_NUMBER\n'
        "%import common.CNAME -> NAME\n%import common (ESCAPED_STRING, SIGNED_NUMBER, WS)\n%ignore WS",
        ['f(1, "a\\"b", g())', " f ( -1.5e3 )\n"],
        ["f(1,)", 'f("a)', "f"],
    ),
    "select": (
        'start: "SELECT"i _WS column ("," _WS? column)* _WS "FROM"i _WS table // only this\n'
        'column: /[a-z_]+/ | STAR\ntable: /[a-z_]+/\nSTAR: "*"\n_WS: / +/',
        ["SELECT a, b FROM t", "select * from x"],
        ["SELECT FROM t", "SELECT a b FROM t"],
    ),
    "a rule root": ('start: root "b" | "x" root?\nroot: "a"', ["ab", "xa", "x"], ["xb", "a", "aba"]),
    "only a rule root": ('start: root\nroot: "a"', ["a"], ["", "aa"]),
    "quotes": (
        'start: (QUOTED | "\\\\" | "\\n" | TAB)+\nQUOTED: "\\"" /[^"]*/ "\\""\nTAB: /\\t/',
        ['"a"\\\n\t', '"\n"'],
        ['"', "a"],
    ),
    "counted": ('start: (WORD "-")~2..3 "x".."z"~2\nWORD: "a".."c"~1..2', ["a-bc-xy", "a-a-a-zz"], ["a-xy", "a-b-x"]),
    "nested": ('start: "(" start ")" | "[" start? "]"', ["([])", "[[]]"], ["(", "()", "[)"]),
    "classes": (
        r"start: /\w+/ /\s/ /\D/i /[^\d\W]/ /[^ab]/i /./s",
        ["ab c x\n"[:0] + "ab cxyz"],
        ["ab c1xz", "ab cxAz"],
    ),
    "left": (
        'start: list\nlist: list ";" item | item\nitem: "if"i | /[a-z]/+\n%ignore / +/',
        ["a;b", "IF ; a b"],
        ["a;", ";"],
    ),
    "empty": ('start: [A] B*\nA.2: "a"\nB: /b{2,3}/', ["", "a", "abbbbb"], ["ab", "b"]),
    "letters": ('start: "é" /[α-ω\\x41\\u00e5]+/ "\\u4e2d"', ["éαA中", "éå中"], ["éα", "eα中"]),
    "patch": (
        PATCH,
        ["*** Begin Patch\n*** Add File: a\n+x\n+\n*** Delete File: b\n*** End Patch"],
        ["*** Begin Patch\n*** End Patch\n", "*** Begin Patch\n*** Add File: a\n*** End Patch"],
    ),
}


def as_the_package_has_it(definition: str) -> str:
    """The same texts: the package refuses alternatives that its simplification makes equal, and empty terminals in rules."""
    return re.sub(r"\n\| (term|factor)$", "", definition, flags=re.M).replace("/(.*)/", "[/.+/]")


def tools_of(definition: str) -> Tools:
    grammar = {"syntax": "lark", "definition": definition}
    tool = {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": grammar}}}
    return read_tools([tool], {"type": "custom", "custom": {"name": "f"}}, None)


def grammar_of(definition: str) -> str:
    form = form_of(Wanted(OutputSyntax(), tools_of(definition), None, False, {}))
    assert form is not None
    return form.grammar


def written(text: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {json.dumps({"input": text}, ensure_ascii=False)}}}\n</tool_call>'


def input_of(call: str) -> str:
    body = call.removeprefix("<tool_call>").removesuffix("</tool_call>")
    value: str = json.loads(body)["arguments"]["input"]
    return value


def drawn(grammar: str, seed: int) -> str | None:
    """A call by random weights that get into the habit of closing; None if it has not ended."""
    rng = random.Random(seed)
    one, text = automaton(grammar), b""
    weights = {token: rng.random() for token in range(len(VOCABULARY))}
    for step in range(400):
        allowed = tokens_of(one.mask)
        assert allowed, text
        ends = (b"n",) if text.endswith(b"\\") else (b'"', b")", b"]", b"}", b";", b"\\", b"E")
        closing = [token for token in allowed if token == END or VOCABULARY[token] in ends]
        usual = [token for token in allowed if token == END or 32 <= VOCABULARY[token][0] < 127] or allowed
        choice = closing if closing and rng.random() < step / 100 else usual if rng.random() < 0.8 else allowed
        token = rng.choices(choice, [weights[one] + 1e-3 for one in choice])[0]
        if token == END:
            return text.decode()
        text += VOCABULARY[token]
        one.advance(token)
        assert not one.fault, (one.fault, text)
        if one.ended:
            return text.decode()
    return None


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_is_drawn_is_read_by_larks_own_parser(name: str) -> None:
    definition, good, bad = GRAMMARS[name]
    parser = Lark(as_the_package_has_it(definition), parser="earley", lexer="dynamic_complete")
    grammar = grammar_of(definition)
    for text in good:
        parser.parse(text)
        assert matches(grammar, written(text)), text
    for text in bad:
        with pytest.raises(NotRead):
            parser.parse(text)
        assert not matches(grammar, written(text)), text
    ended = [call for seed in range(40) if (call := drawn(grammar, seed)) is not None]
    assert len(ended) >= 10
    for call in ended:
        parser.parse(input_of(call))


def test_long_inputs_stay_within_what_a_mask_may_cost() -> None:
    grammar = grammar_of(GRAMMARS["calls"][0])
    for text in (f'f("{"a" * 2000}")', f"f({' ' * 2000}1{chr(10) * 2000})", "f(" * 300 + "1" + ")" * 300):
        assert matches(grammar, written(text)), text[:20]
    grammar = grammar_of(ARITHMETIC)
    assert matches(grammar, written(" + ".join(["12 * 3"] * 300)))


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("", "no rule start"),
        ("start: a", "no rule or terminal a"),
        ("start: A\nA: b\nb: /x/", "the terminal A refers to the rule b"),
        ("start: A\nA: B\nB: A", "refers to itself"),
        ("start: A\nA: /x*/", "matches the empty text"),
        ('start: A\nA: "x"?', "matches the empty text"),
        ("start: /(?=a)b/", "Look-around"),
        ("start: /a.*?b/", "lazy"),
        ("start: /^a$/", "Anchors"),
        ("start: /[^]]/", "class that begins with ']'"),
        ("start: /[]a]/i", "class that begins with ']'"),
        ("start: a{b}\na{x}: x", "cannot be read"),
        ("%import python.NAME\nstart: NAME", "module common"),
        ("%import .own.X\nstart: X", "name should stand"),
        ("%declare X\nstart: X", "%declare"),
        ('start: "(" start', "has no text that ends"),
        ("start: root\nroot: /a/ root", "the rule start has no text that ends"),
        ("start: A\nA: /[^\\s\\S]/", "has no text that ends"),
        ('start: "a"~2000', "1000 times"),
        ("start: " + "(" * 40 + '"a"' + ")" * 40, "nested deeper"),
        ('start: "\\U0001F600"', "escape"),
        ('start: "a" )', "line should end"),
        ("start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(40)) + 'A40: "x"', "deeper than 32"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(600)) + 'a600: "x"', "more than 500"),
        ("start: /\\x01/ ~ 2", "no short escape"),
    ],
)
def test_what_cannot_be_enforced_is_refused_in_a_sentence(definition: str, words: str) -> None:
    with pytest.raises(ApiError) as fault:
        tools_of(definition)
    assert (fault.value.status, fault.value.code) == (400, "unsupported_schema")
    assert fault.value.param == "tools[0].custom.format.grammar.definition"
    assert words in fault.value.message
