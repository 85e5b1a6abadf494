"""docs/design/metering.md says of every equation what the code says, and names modules and tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from money import EQUATIONS

from accounting.books import equations
from accounting.books.equations import PAGE, SECTION, Equation

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
QUOTED = re.compile(r"`([^`]+)`")
ALL = {f"I{number}" for number in range(1, 24)}


class Row(NamedTuple):
    id: str
    name: str
    meaning: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]


def rows(text: str) -> list[Row]:
    """The lines of tables that begin with the id of an equation."""
    found = []
    for line in text.splitlines():
        if re.match(r"\| I\d+ ", line):
            title, meaning, modules, tests = (cell.strip() for cell in line.strip("|").split("|"))
            equation, _, name = title.partition(" ")
            found.append(Row(equation, name, meaning, *map(_quoted, (modules, tests))))
    return found


def _quoted(cell: str) -> tuple[str, ...]:
    return tuple(QUOTED.findall(cell))


def section(number: str) -> str:
    """From its heading to the next heading of any level."""
    [found] = re.findall(rf"^#+ {re.escape(number)}\.? .*?$(.*?)(?=^#+ |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    return str(found)


ROWS = rows(TEXT)


def functions(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_section_that_the_command_names_has_the_code_s_own_sentences():
    told = [(row.id, row.name, row.meaning) for row in rows(section(SECTION))]
    assert told == [(one.id, one.name, one.meaning) for one in EQUATIONS]


def test_every_equation_has_one_row():
    assert sorted(row.id for row in ROWS) == sorted(ALL)


def test_every_equation_is_checked_somewhere():
    """A result can name an equation only by its constant, so an unused one is checked by nobody."""
    named = {name for name, one in vars(equations).items() if isinstance(one, Equation)}
    used: set[str] = set()
    for path in (*(ROOT / "accounting").rglob("*.py"), *(ROOT / "gateway").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        used |= {
            node.attr
            for node in (ast.walk(ast.parse(text)) if "equations" in text else ())
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "equations"
        }
    assert named - used == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_modules_and_the_tests_of_a_row_are_there(row: Row):
    assert row.modules
    assert row.tests
    assert [path for path in row.modules if not (ROOT / path).is_file()] == []
    for path, _, function in (test.partition("::") for test in row.tests):
        assert function in functions(ROOT / path), f"{path} has no {function}"
