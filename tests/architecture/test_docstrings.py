"""Docstrings: a name has one (B10), and its first sentence has a subject, so that a stranger knows who does what."""

from __future__ import annotations

import ast
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


def doubled(source: str) -> list[int]:
    """Lines of strings that stand alone behind another one."""
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(source)))
    return [
        second.lineno
        for body in bodies
        if isinstance(body, list)
        for first, second in itertools.pairwise(body)
        if _is_string(first) and _is_string(second)
    ]


def fragments(source: str) -> list[str]:
    """First words of the strings that stand alone and begin without a subject, with their lines."""
    strings = (node for node in ast.walk(ast.parse(source)) if _is_string(node))
    texts = ((node.lineno, ast.get_source_segment(source, node) or "") for node in strings)
    starts = ((line, text.lstrip("rbuRBU").strip("\"'").lstrip()) for line, text in texts)
    return [f"{line}: {text[:60]}" for line, text in starts if text and re.split(r"\W", text)[0] in WITHOUT_SUBJECT]


def _is_string(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def test_the_check_sees_a_second_string() -> None:
    assert doubled('A = 1\n"""one"""\n"""two"""\n') == [3]
    assert doubled('"""module"""\nA = 1\n"""one"""\nB = 2\n"""two"""\n') == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_b10_no_name_has_two_docstrings(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {str(path.relative_to(ROOT)): lines for path in paths if (lines := doubled(path.read_text()))}
    assert found == {}


def test_the_check_sees_a_fragment() -> None:
    assert fragments('A = 1\n"""Of endings."""\n') == ["2: Of endings."]
    assert fragments('def f():\n    """Returns the sum."""\n') == []


@pytest.mark.parametrize("folder", PRODUCT)
def test_a_docstring_begins_with_its_subject(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): lines for path in paths if (lines := fragments(path.read_text()))}
    assert found == {}
