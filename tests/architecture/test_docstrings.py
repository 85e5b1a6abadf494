"""B10: a name has one docstring; a second string behind it is read by nobody and says something else."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
