"""The pages name every room, and the files and functions that they send a newcomer to are there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs" / "design" / "architecture.md").read_text()
README = (ROOT / "README.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
ORDERS = {
    one["containers"][0]: [layer.split(" | ") for layer in one["layers"]] for one in CONTRACTS if "containers" in one
}
"""Of each package with rooms: its layers from top to bottom, each with what stands in it."""
SCREENS = {f"console/screens/{group}" for group in ("access", "money", "operation", "traffic")}
BESIDE_THE_ROAD = {
    "cli",
    "billing",
    "books",
    "console",
    "console/screens",
    *SCREENS,
    "configuration",
    "estimates",
    "batches",
}
"""Rooms of the gateway that no request for tokens passes."""


def part(page: str, heading: str) -> str:
    """A page from a heading to the next one of the same depth or above it."""
    depth = re.match("#+", heading)
    assert depth is not None
    assert page.count(f"\n{heading}\n") == 1, heading
    return re.split(rf"\n#{{2,{len(depth[0])}}} ", page.split(f"\n{heading}\n")[1])[0]


FOLLOW = [
    (Path(match[2]), match[3], int(match[1]))
    for match in re.finditer(
        r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \|",
        part(ARCHITECTURE, "## 7. Follow one request and one token's charge"),
        re.M,
    )
]
ROAD = re.findall(r"^ ?(\d+)  (\S+)", part(README, "## One request, room by room"), re.M)


def rooms(package: str) -> set[str]:
    folder = ROOT / package.replace(".", "/")
    found = (path.parent for path in folder.rglob("__init__.py") if path.parent != folder)
    return {f"{path.relative_to(ROOT).as_posix()}/" for path in found}


def listed(package: str) -> list[str]:
    prefix = re.escape(package.replace(".", "/"))
    return re.findall(rf"^\| `({prefix}/[\w/]+/)` \| [A-Z`].*\. ?\|$", part(ARCHITECTURE, "### 2.1 Rooms"), re.M)


def functions(path: Path) -> set[str]:
    """Names of a module's functions, and of its classes' as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        for one in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(f"{node.name}.{one.name}" if isinstance(node, ast.ClassDef) else one.name)
    return names


@pytest.mark.parametrize("package", ORDERS)
def test_every_room_has_one_line_in_the_table(package):
    assert len(rooms(package)) > 2
    assert sorted(listed(package)) == sorted(rooms(package))


@pytest.mark.parametrize("package", ORDERS)
def test_nothing_stands_in_the_init_of_a_room(package):
    assert [room for room in sorted(rooms(package)) if (ROOT / room / "__init__.py").read_text()] == []


@pytest.mark.parametrize("package", ORDERS)
def test_the_table_of_rooms_has_the_order_of_the_contract(package):
    layer_of = {name: number for number, layer in enumerate(ORDERS[package]) for name in layer}
    depth = package.count(".") + 1
    layers = [layer_of[room.split("/")[depth]] for room in listed(package)]
    assert layers == sorted(layers)


def test_every_contract_has_its_row():
    rows = re.findall(r"^\| ([^|]+?) \|", part(ARCHITECTURE, "## 2. Folders and the direction of imports"), re.M)
    for contract in CONTRACTS:
        name = contract["name"].partition(":")[0]
        kind, _, of = name.partition(" of the ")
        assert any(row == name or (of and row.startswith(kind) and f"of the {of}" in row) for row in rows), name


def test_a_newcomer_opens_at_most_twelve_files_in_order():
    assert [number for _, _, number in FOLLOW] == list(range(1, len(FOLLOW) + 1))
    assert 8 <= len(FOLLOW) <= 12
    assert len({path for path, _, _ in FOLLOW}) == len(FOLLOW)


@pytest.mark.parametrize(("path", "function"), [(path, function) for path, function, _ in FOLLOW])
def test_every_function_that_a_newcomer_is_sent_to_is_there(path, function):
    assert function in functions(ROOT / path)


def test_the_readme_leads_to_the_twelve_files():
    assert "docs/design/architecture.md#7-follow-one-request-and-one-tokens-charge" in README


def test_the_road_in_the_readme_names_files_that_are_there():
    assert [int(number) for number, _ in ROAD] == list(range(1, len(ROAD) + 1))
    assert len(ROAD) > 15
    named = re.findall(
        r"\b(?:gateway|accounting|workers|cache|kernels)/[\w/.]*", part(README, "## One request, room by room")
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_road_in_the_readme_passes_every_room_of_the_gateway():
    road = part(README, "## One request, room by room")
    missing = {room for room in rooms("gateway") if room not in road}
    assert missing == {f"gateway/{name}/" for name in BESIDE_THE_ROAD}


def test_the_folders_in_the_readme_are_those_that_are_there():
    named = re.findall(r"`([\w/]+/)`", part(README, "## The folders"))
    there = {path.name for path in ROOT.iterdir() if path.is_dir() and list(path.rglob("*.py")) and path.name[0] != "."}
    assert {name.split("/")[0] for name in named} == there
    assert {f"workers/{path.parent.name}/" for path in (ROOT / "workers").glob("*/__init__.py")} <= set(named)
