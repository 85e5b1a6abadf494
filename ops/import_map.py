"""Draws which folder imports which: docs/design/imports.svg.

A node is a folder of a package, or a module that lies beside such folders. Each row of the picture is a level: whatever a
folder imports stands in a lower row, so every arrow points down. An arrow is left out where other arrows already lead from the
same start to the same end. The same imports always give the same bytes.

`make import-map` writes the picture; a test says when it is not current.
"""

from __future__ import annotations

import graphlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import quoteattr

import grimp

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "design" / "imports.svg"
PACKAGES = ("gateway", "accounting", "workers", "cache", "kernels")
WITH_ROOMS = ("gateway", "accounting", "workers.engine", "workers.jobs", "cache", "kernels")
"""Packages whose folders are nodes; each other package is one node."""
WHOLE = ("workers.protocol", "workers.process")

COLOURS = {
    "gateway": "#2563a8",
    "accounting": "#2b7a4b",
    "workers.engine": "#a4501c",
    "kernels": "#7a3fa0",
    "workers.jobs": "#8a6d00",
    "workers.protocol": "#4a5560",
    "workers.process": "#1f7a80",
    "cache": "#a02f55",
}
NODE_HEIGHT, ROW_HEIGHT, GAP, LINE_GAP, MARGIN, TOP = 36, 84, 16, 9, 24, 76
SWEEPS = 40

Arrow = tuple[str, str]
Graph = Mapping[str, set[str]]


def module_imports() -> dict[str, set[str]]:
    """Returns each module and the modules of ours that it imports, for type checkers too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {name: set(graph.find_modules_directly_imported_by(name)) for name in sorted(graph.modules)}


def node_of(module: str) -> str | None:
    """Returns the folder that stands for a module in the picture; None for an empty package above the nodes."""
    for package in WHOLE:
        if module == package or module.startswith(package + "."):
            return package
    for package in WITH_ROOMS:
        if module.startswith(package + "."):
            return ".".join(module.split(".")[: package.count(".") + 2])
    return None


def folder_imports(imports: Graph) -> dict[str, set[str]]:
    """Returns each node and the other nodes that it imports."""
    found: dict[str, set[str]] = {}
    for module, imported in imports.items():
        node = node_of(module)
        if node is not None:
            found.setdefault(node, set()).update(
                other for name in imported if (other := node_of(name)) is not None and other != node
            )
    return dict(sorted(found.items()))


def module_counts() -> dict[str, int]:
    """Returns how many modules each node has, those of folders inside it included; an `__init__.py` is not counted."""
    counts: dict[str, int] = defaultdict(int)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            node = node_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            if node is not None and path.name != "__init__.py":
                counts[node] += 1
    return dict(counts)


def circle(graph: Graph) -> list[str]:
    """Nodes that import each other in a circle, the first one again at the end; empty where there is none."""
    try:
        graphlib.TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)}).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def reached(graph: Graph) -> dict[str, set[str]]:
    """Returns everything that each node imports, also through others."""
    found: dict[str, set[str]] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        found[name] = set().union(*({other} | found[other] for other in graph.get(name, ())))
    return found


def fewest_arrows(graph: Graph) -> dict[str, set[str]]:
    """Returns the same graph without each import that already follows from others."""
    below = reached(graph)
    return {
        name: {one for one in imported if not any(one in below[other] for other in imported)}
        for name, imported in graph.items()
    }


def rows_of(arrows: Graph) -> dict[str, int]:
    """Returns the row of each node, 0 at the top. A node stands as high as it can, or with more arrows out than in as
    low."""
    order = list(graphlib.TopologicalSorter({name: sorted(arrows[name]) for name in sorted(arrows)}).static_order())
    importers: dict[str, list[str]] = {name: [] for name in order}
    for name in order:
        for one in arrows[name]:
            importers[one].append(name)
    level: dict[str, int] = {}
    for name in order:
        level[name] = 1 + max((level[one] for one in arrows[name]), default=-1)
    for _ in order:
        before = dict(level)
        for name in reversed(order):
            if importers[name] and len(importers[name]) >= len(arrows[name]):
                level[name] = min(level[one] for one in importers[name]) - 1
            elif arrows[name] and len(importers[name]) < len(arrows[name]):
                level[name] = 1 + max(level[one] for one in arrows[name])
        if level == before:
            break
    top = max(level.values())
    return {name: top - level[name] for name in order}


@dataclass(slots=True)
class Layout:
    """Places of nodes and of the points where long arrows cross a row. A point is named by its arrow and its row."""

    rows: list[list[str]]
    arrows: dict[Arrow, list[str]]
    """Each arrow and what it passes: its start, one point for each row between, its end."""
    width: dict[str, int]
    x: dict[str, float] = field(default_factory=dict)
    above: dict[str, list[str]] = field(default_factory=dict)
    below: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            for name in row:
                self.above[name], self.below[name] = [], []
        for path in self.arrows.values():
            for upper, lower in itertools.pairwise(path):
                self.below[upper].append(lower)
                self.above[lower].append(upper)

    def is_point(self, name: str) -> bool:
        return ">" in name


def layout_of(arrows: Graph) -> Layout:
    row_of = rows_of(arrows)
    rows: list[list[str]] = [[] for _ in range(max(row_of.values()) + 1)]
    for name in sorted(row_of, key=_by_package):
        rows[row_of[name]].append(name)
    paths: dict[Arrow, list[str]] = {}
    for start in sorted(arrows):
        for end in sorted(arrows[start]):
            points = [f"{start}>{end}>{row}" for row in range(row_of[start] + 1, row_of[end])]
            for row, point in enumerate(points, row_of[start] + 1):
                rows[row].append(point)
            paths[start, end] = [start, *points, end]
    widths = {name: LINE_GAP if ">" in name else max(74, 26 + 7 * len(_label(name))) for row in rows for name in row}
    layout = Layout(rows, paths, widths)
    _order(layout)
    _place(layout)
    return layout


def _by_package(name: str) -> tuple[int, str]:
    left = ("gateway", "accounting", "workers.jobs", "workers.process", "workers.protocol")
    places = (*left, "cache", "workers.engine", "kernels")
    return places.index(_package(name)), name


def _package(name: str) -> str:
    return next(one for one in COLOURS if name == one or name.startswith(one + "."))


def _order(layout: Layout) -> None:
    """Puts each row in an order with few crossings: neighbours' mean places, then exchanges of neighbours."""
    best = [list(row) for row in layout.rows]
    fewest = _crossings(layout)
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        last = len(layout.rows) - 1
        for row_no in range(1, last + 1) if downwards else range(last - 1, -1, -1):
            row = layout.rows[row_no]
            beside = layout.rows[row_no - 1 if downwards else row_no + 1]
            place = {name: number for number, name in enumerate(beside)}
            near = layout.above if downwards else layout.below
            own = {name: number * len(beside) / len(row) for number, name in enumerate(row)}
            row.sort(key=lambda name: _mean([place[one] for one in near[name]], own[name]))
        _exchange(layout)
        crossings = _crossings(layout)
        if crossings < fewest:
            best, fewest = [list(row) for row in layout.rows], crossings
    layout.rows = best


def _exchange(layout: Layout) -> None:
    for row_no, row in enumerate(layout.rows):
        place = {
            name: number
            for other in (row_no - 1, row_no + 1)
            if 0 <= other < len(layout.rows)
            for number, name in enumerate(layout.rows[other])
        }
        for number in range(len(row) - 1):
            left, right = row[number], row[number + 1]
            if _crossed(layout, place, left, right) > _crossed(layout, place, right, left):
                row[number], row[number + 1] = right, left


def _crossed(layout: Layout, place: dict[str, int], left: str, right: str) -> int:
    return sum(
        place[one] > place[other]
        for near in (layout.above, layout.below)
        for one in near[left]
        for other in near[right]
    )


def _crossings(layout: Layout) -> int:
    total = 0
    for upper, lower in itertools.pairwise(layout.rows):
        place = {name: number for number, name in enumerate(lower)}
        ends = [end for name in upper for end in sorted(place[one] for one in layout.below[name])]
        total += sum(ends[i] > ends[j] for i in range(len(ends)) for j in range(i + 1, len(ends)))
    return total


def _mean(values: Iterable[float], otherwise: float) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else otherwise


def _place(layout: Layout) -> None:
    """Gives each name the middle of its place: as near to its neighbours as the order and the widths allow."""
    for row in layout.rows:
        right = 0.0
        for name in row:
            layout.x[name] = right + layout.width[name] / 2
            right += layout.width[name] + _gap(layout, name)
    for sweep in range(2 * SWEEPS):
        rows = layout.rows if sweep % 2 == 0 else layout.rows[::-1]
        for row in rows:
            wanted = [_mean((layout.x[one] for one in _near(layout, name)), layout.x[name]) for name in row]
            for name, x in zip(row, _apart(layout, row, wanted), strict=True):
                layout.x[name] = x
    left = min(layout.x[name] - layout.width[name] / 2 for name in layout.x)
    for name in layout.x:
        layout.x[name] += MARGIN - left


def _near(layout: Layout, name: str) -> list[str]:
    return layout.above[name] + layout.below[name]


def _gap(layout: Layout, name: str) -> int:
    return 2 if layout.is_point(name) else GAP


def _apart(layout: Layout, row: list[str], wanted: list[float]) -> list[float]:
    """Returns the places nearest to those wanted, by least squares, that keep the order and the distances."""
    offset = [0.0]
    for left, right in itertools.pairwise(row):
        gap = max(_gap(layout, left), _gap(layout, right))
        offset.append(offset[-1] + (layout.width[left] + layout.width[right]) / 2 + gap)
    groups: list[tuple[float, float, int]] = []  # sum of weighted places, weight, how many
    for name, place, moved in zip(row, wanted, offset, strict=True):
        weight = 4.0 if layout.is_point(name) else 1.0  # long arrows are to be straight
        group = ((place - moved) * weight, weight, 1)
        while groups and groups[-1][0] / groups[-1][1] > group[0] / group[1]:
            before = groups.pop()
            group = (before[0] + group[0], before[1] + group[1], before[2] + group[2])
        groups.append(group)
    places = [total / weight for total, weight, num in groups for _ in range(num)]
    return [place + moved for place, moved in zip(places, offset, strict=True)]


def _label(node: str) -> str:
    package = _package(node)
    if node == package:
        return node.replace(".", "/") + "/"
    name = node[len(package) + 1 :]
    return name + ".py" if (ROOT / node.replace(".", "/")).with_suffix(".py").exists() else name + "/"


def picture() -> str:
    """Returns the whole SVG. Raises AssertionError where folders import each other in a circle."""
    graph = folder_imports(module_imports())
    assert not circle(graph), f"a circle: {' → '.join(circle(graph))}"
    layout, counts = layout_of(fewest_arrows(graph)), module_counts()
    width = round(max(layout.x[name] + layout.width[name] / 2 for name in layout.x)) + MARGIN
    height = TOP + len(layout.rows) * ROW_HEIGHT - (ROW_HEIGHT - NODE_HEIGHT) + MARGIN
    y = {name: TOP + number * ROW_HEIGHT for number, row in enumerate(layout.rows) for name in row}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        "<title>Imports by folder</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(),
        *(_arrow(layout, y, arrow) for arrow in sorted(layout.arrows)),
        *(_node(layout, y, name, counts[name]) for row in layout.rows for name in row if not layout.is_point(name)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> Iterable[str]:
    yield (
        f'<text x="{MARGIN}" y="28" font-size="14" fill="#222">An arrow says "imports". It is left out where other arrows '
        "lead to the same folder. A number says how many modules a folder has.</text>"
    )
    x = MARGIN
    for package, colour in COLOURS.items():
        yield f'<rect x="{x}" y="42" width="14" height="14" rx="3" fill="{colour}"/>'
        yield f'<text x="{x + 20}" y="54" font-size="13" fill="#222">{package}</text>'
        x += 44 + 8 * len(package)


def _node(layout: Layout, y: dict[str, int], name: str, count: int) -> str:
    width, colour, label = layout.width[name], COLOURS[_package(name)], _label(name)
    left = round(layout.x[name] - width / 2)
    second = f"{count} modules" if not label.endswith(".py") else "a module"
    middle = left + width // 2
    return (
        f'<g class="node" id={quoteattr(name)}><rect x="{left}" y="{y[name]}" width="{width}" height="{NODE_HEIGHT}" '
        f'rx="6" fill="{colour}"/><text x="{middle}" y="{y[name] + 16}" font-size="13" font-weight="bold" fill="#fff" '
        f'text-anchor="middle">{label}</text><text x="{middle}" y="{y[name] + 30}" font-size="11" fill="#fff" '
        f'text-anchor="middle">{second}</text></g>'
    )


def _arrow(layout: Layout, y: dict[str, int], arrow: Arrow) -> str:
    start, end = arrow
    path = layout.arrows[arrow]
    x, top = _port(layout, start, path[1], layout.below), y[start] + NODE_HEIGHT
    drawn = [f"M{x} {top}"]
    for name in path[1:-1]:
        to_x, middle = round(layout.x[name]), (top + y[name]) // 2
        drawn.append(f"C{x} {middle} {to_x} {middle} {to_x} {y[name]}")
        x, top = to_x, y[name] + NODE_HEIGHT
        drawn.append(f"V{top}")
    to_x, tip = _port(layout, end, path[-2], layout.above), y[end] - 7
    middle = (top + tip) // 2
    drawn.append(f"C{x} {middle} {to_x} {middle} {to_x} {tip}")
    colour = COLOURS[_package(start)]
    return (
        f'<g class="arrow" id={quoteattr(f"{start} > {end}")}><path d="{"".join(drawn)}" fill="none" stroke="{colour}" '
        f'stroke-width="1.4" stroke-opacity="0.75"/><path d="M{to_x} {y[end]}l-4 -8h8z" fill="{colour}"/></g>'
    )


def _port(layout: Layout, node: str, neighbour: str, near: dict[str, list[str]]) -> int:
    """Returns the point on a node's edge where an arrow begins or ends. Arrows stand side by side in the order of where
    they go."""
    beside = sorted(near[node], key=lambda name: (layout.x[name], name))
    step = (layout.width[node] - 16) / (len(beside) + 1)
    return round(layout.x[node] - layout.width[node] / 2 + 8 + step * (1 + beside.index(neighbour)))


if __name__ == "__main__":
    PICTURE.write_text(picture())
