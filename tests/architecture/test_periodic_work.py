"""The table of periodic work in operations.md has the periods of the code, and every module that repeats a round."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/design/operations.md"
ROW = re.compile(r"^\| (?:gateway|jobs|worker) \| .+ \| ([\d.]+) (?:s|rounds) \| `(\w+)` of `([\w/]+\.py)` \|$", re.M)
REPEATS = re.compile(r"\b(?:(?:repeat|ask_sql)\(|background\((?:repeat|ask_sql), )\s*([\w.]+)")


def section() -> str:
    return PAGE.read_text().split("## 12. Periodic work", 1)[1].split("\n## ", 1)[0]


ROWS = ROW.findall(section())


def test_every_row_of_the_table_has_the_form_that_is_compared():
    assert len(ROWS) == sum(line.startswith(("| gateway ", "| jobs ", "| worker ")) for line in section().splitlines())


@pytest.mark.parametrize(("period", "name", "module"), ROWS)
def test_a_period_is_what_the_code_says(period, name, module):
    tree = ast.parse((ROOT / module).read_text())
    assert float(period) == value_of(tree, name)


def value_of(tree: ast.Module, name: str) -> float | None:
    """Returns the number of a constant, or the number that a scaled duration is made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = zip(target.elts, value.elts, strict=True) if isinstance(target, ast.Tuple) else [(target, value)]
            for one, number in pairs:
                if isinstance(one, ast.Name) and one.id == name:
                    return float(ast.literal_eval(number.args[0] if isinstance(number, ast.Call) else number))
    return None


def test_every_round_that_is_repeated_stands_in_the_table():
    listed = {(name, module) for _, name, module in ROWS}
    found = {
        (name, source_of(name, path))
        for package in ("gateway", "workers")
        for path in (ROOT / package).rglob("*.py")
        if "import repeat" in (text := path.read_text()) or "ask_sql" in text
        for name in REPEATS.findall(text)
    }
    constants = {
        (name.split(".")[-1], module) for name, module in found if name.isupper() or name.split(".")[-1].isupper()
    }
    assert len(constants) > 10, constants
    assert constants <= listed
    fields = {name.split(".")[-1].lstrip("_") for name, _ in found} - {name for name, _ in constants}
    names = {name.lower() for name, _ in listed}
    assert fields <= names, "a period of a setting or an argument is named after the constant that it comes from"


def source_of(name: str, path: Path) -> str:
    """Returns the file that defines a name or the module of a dotted name, as the imports of `path` say."""
    first, *rest = name.split(".")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and first in {alias.name for alias in node.names}:
            return "/".join((node.module or "").split(".") + ([first] if rest else [])) + ".py"
    return str(path.relative_to(ROOT))
