"""Docstrings: a name has one (B10), its first sentence has a subject, so that a stranger knows who does what, and that
of a function says what it does in the third person.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("accounting", "benchmarks", "cache", "gateway", "kernels", "migrations", "ops", "workers")
WITHOUT_SUBJECT = [
    "Of",
    "With",
    "Without",
    "Behind",
    "Beside",
    "Whose",
    "Who",
    "Whom",
    "Which",
    "That",
    "Those",
    "What",
    "As",
    "By",
    "From",
    "In",
    "Into",
    "On",
    "To",
    "For",
    "Until",
    "Before",
    "After",
    "If",
    "Where",
    "None",
    "So",
    "Such",
]
"""A docstring that begins with one of these is a fragment of a sentence, or its subject comes late."""
FOLDERS = ("accounting", "benchmarks", "cache", "gateway", "kernels", "migrations", "ops", "tests", "workers")


TWO_STRINGS = re.compile(r"""["'][ \t)]*(?:;|(?:\#.*)?\n(?:[ \t]*(?:\#.*)?\n)*)[ \t(]*[rRuU]?["']""")
"""What a file has in it wherever a string stands alone behind another one. Few tests have it, and only they are parsed."""


@functools.cache
def read(path: Path) -> tuple[list[int], list[str], list[tuple[int, str]]]:
    """Returns the doubled strings of a file, its fragments, and how its functions' docstrings begin."""
    tree = ast.parse(path.read_text())
    return doubled(tree), fragments(tree), beginnings(tree)


def statements(tree: ast.Module) -> list[ast.AST]:
    """Returns the module, its statements, and those within them. No expression has a statement in it."""
    found: list[ast.AST] = [tree]
    for node in found:
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, name, ())
    return found


def doubled(tree: ast.Module) -> list[int]:
    """Lines of strings that stand alone behind another one."""
    return [
        second.lineno
        for node in statements(tree)
        for first, second in itertools.pairwise(getattr(node, "body", ()))
        if _is_string(first) and _is_string(second)
    ]


def fragments(tree: ast.Module) -> list[str]:
    """First words of the strings that stand alone and begin without a subject, with their lines."""
    starts = ((node.lineno, node.value.value.lstrip()) for node in statements(tree) if _is_string(node))
    return [f"{line}: {text[:60]}" for line, text in starts if text and re.split(r"\W", text)[0] in WITHOUT_SUBJECT]


def beginnings(tree: ast.Module) -> list[tuple[int, str]]:
    """Returns line and first word of each function's docstring. That of a command is its help, which tells its user
    what to do, and that of a property says what the value is.
    """
    functions = (node for node in statements(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    texts = ((one.lineno, ast.get_docstring(one)) for one in functions if not _is_other(one))
    return [(line, re.split(r"\W", text)[0]) for line, text in texts if text]


def imperatives(words: set[str]) -> set[str]:
    """Returns the words of which the third person is among them too: "Return" beside "Returns"."""
    return {word for word in words if word and {f"{word}s", f"{word}es", f"{word[:-1]}ies"} & words}


def _is_other(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(re.search(r"\b(command|group|\w*property)\b", ast.unparse(one)) for one in function.decorator_list)


def _is_string(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


@pytest.mark.parametrize("between", ["\n", " # why\n\n  # and more\n", ";"])
def test_the_check_sees_a_second_string(between: str) -> None:
    text = f'A = 1\n"""one"""{between}"""two"""\n'
    assert TWO_STRINGS.search(text)
    assert doubled(ast.parse(text)) == [text[: text.index("two")].count("\n") + 1]
    assert doubled(ast.parse('"""module"""\nA = 1\n"""one"""\nB = 2\n"""two"""\n')) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_b10_no_name_has_two_docstrings(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    suspects = paths if folder in PRODUCT else [path for path in paths if TWO_STRINGS.search(path.read_text())]
    found = {str(path.relative_to(ROOT)): lines for path in suspects if (lines := read(path)[0])}
    assert found == {}


def test_the_check_sees_a_fragment() -> None:
    assert fragments(ast.parse('A = 1\n"""Of endings."""\n')) == ["2: Of endings."]
    assert fragments(ast.parse('def f():\n    """Returns the sum."""\n')) == []


@pytest.mark.parametrize("folder", [*PRODUCT, "tests"])
def test_a_docstring_begins_with_its_subject(folder: str) -> None:
    """Of the tests only the helpers are held to it, which lie directly in their folder."""
    paths = sorted((ROOT / folder).glob("*.py") if folder == "tests" else (ROOT / folder).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): lines for path in paths if (lines := read(path)[1])}
    assert found == {}


def test_the_check_sees_an_imperative() -> None:
    words = {"Returns", "Return", "Marries", "Marry", "Pass", "Passes", "The", "Number"}
    assert imperatives(words) == {"Return", "Marry", "Pass"}
    command = '@main.command("send")\ndef f():\n    """Send a request."""\n'
    assert beginnings(ast.parse(command + 'def g():\n    """Returns a sum."""\n')) == [(4, "Returns")]


def test_a_function_says_what_it_does_in_the_third_person() -> None:
    begins = {path: read(path)[2] for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))}
    bare = imperatives({word for words in begins.values() for _, word in words})
    assert [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path, words in begins.items()
        for line, word in words
        if word in bare
    ] == []
