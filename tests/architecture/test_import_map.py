"""Folders import one way, they stay small, and the picture of their imports shows what the code does."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("import_map", ROOT / "ops" / "import_map.py")
assert _spec is not None and _spec.loader is not None
import_map = importlib.util.module_from_spec(_spec)
sys.modules["import_map"] = import_map  # a dataclass looks its module up
_spec.loader.exec_module(import_map)

SVG = "{http://www.w3.org/2000/svg}"
MOST_MODULES = 15
LISTS = {"gateway/cli", "gateway/routes", "gateway/schema"}
"""Folders with one module for each command, group of routes or kind of body: they grow with the API."""


@pytest.fixture(scope="module")
def imports():
    return import_map.module_imports()


@pytest.fixture(scope="module")
def drawn():
    return ElementTree.parse(import_map.PICTURE).getroot()


def groups(drawn, kind):
    return [one for one in drawn.iter(f"{SVG}g") if one.get("class") == kind]


def sides(drawn):
    """The upper and the lower edge of each node."""
    found = {}
    for one in groups(drawn, "node"):
        box = one.find(f"{SVG}rect")
        found[one.get("id")] = (int(box.get("y")), int(box.get("y")) + int(box.get("height")))
    return found


def arrows(drawn):
    return [tuple(one.get("id").split(" > ")) for one in groups(drawn, "arrow")]


def top_modules(folder):
    return [path for path in folder.glob("*.py") if path.name != "__init__.py"]


@functools.cache
def folders():
    inside = (path for package in import_map.PACKAGES for path in (ROOT / package).rglob("__init__.py"))
    return {path.parent.relative_to(ROOT).as_posix(): path.parent for path in inside}


def test_the_picture_is_current():
    assert import_map.PICTURE.read_text() == import_map.picture(), "imports changed: run `make import-map`"


def test_no_arrow_of_the_picture_goes_up(drawn):
    edges = sides(drawn)
    assert len(arrows(drawn)) > 50
    for (start, end), group in zip(arrows(drawn), groups(drawn, "arrow"), strict=True):
        line = group.find(f"{SVG}path").get("d")
        heights = [int(number) for number in re.findall(r"(?:V| )(\d+)(?=[A-Z]|$)", line)]
        assert heights[0] == edges[start][1], f"{start} > {end} begins elsewhere"
        assert heights == sorted(heights), f"{start} > {end} goes up"
        assert edges[end][0] - 10 < heights[-1] < edges[end][0], f"{start} > {end} ends elsewhere"


def test_the_arrows_of_the_picture_lead_wherever_a_folder_imports(imports, drawn):
    graph = import_map.folder_imports(imports)
    shown = {name: set() for name in sides(drawn)}
    for start, end in arrows(drawn):
        shown[start].add(end)
        assert end in graph[start], f"{start} does not import {end}"
    assert set(shown) == set(graph)
    assert import_map.reached(shown) == import_map.reached(graph)


def test_every_module_is_behind_a_node(imports):
    behind = {name for name in imports if import_map.node_of(name) is not None}
    empty = {package for package in imports if "." not in package} | {"workers.engine", "workers.jobs"}
    assert set(imports) - behind <= empty
    files = [path for folder in folders().values() for path in top_modules(folder)]
    assert sum(import_map.module_counts().values()) == len(files)


def test_folders_do_not_import_each_other_in_a_circle(imports):
    assert import_map.circle(import_map.folder_imports(imports)) == []


@pytest.mark.parametrize("folder", sorted({Path(one).parent.as_posix() for one in folders()} - {"."}))
def test_what_lies_in_one_folder_is_in_no_circle(imports, folder):
    """Of every folder that has folders in it: each of these counts with everything inside it."""
    prefix = folder.replace("/", ".") + "."

    def beside(name):
        return name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else None

    graph = {}
    for name, imported in imports.items():
        if (start := beside(name)) is not None:
            graph.setdefault(start, set()).update({beside(one) for one in imported} - {None, start})
    assert import_map.circle(graph) == []


def test_a_circle_is_found_and_named():
    assert import_map.circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) in (
        ["a", "b", "c", "a"],
        ["b", "c", "a", "b"],
        ["c", "a", "b", "c"],
    )


def test_an_arrow_that_follows_from_others_is_left_out():
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert import_map.fewest_arrows(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}


@pytest.mark.parametrize("folder", sorted(folders()))
def test_a_folder_has_few_modules_at_its_top(folder):
    if folder not in LISTS:
        assert len(top_modules(folders()[folder])) <= MOST_MODULES, "a new room, or a module in the room of its idea"
