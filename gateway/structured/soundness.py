"""The checks of a whole schema before a grammar is made of it: it must end, and `oneOf` must be decided. The module is
pure.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any as Json

from gateway.structured.document import DEFINITIONS, Document, Node, alternatives, types

MAX_COMPARISONS = 10_000
"""The most comparisons of two nodes for all `oneOf` of a schema."""
_VALUES = 16
"""The values of `enum` that cost as much as a comparison of two nodes."""


def termless(document: Document) -> str | None:
    """Returns the name of a named schema, or "" for the root, that no finite value satisfies or that refers only to
    itself.
    """
    ending: set[str] = set()
    while True:
        more = {name for name, node in document.named.items() if name not in ending and _ends(node, ending)}
        if not more:
            break
        ending |= more
    for name, node in document.named.items():
        if name not in ending or _leads_to(document, node, name, set()):
            return name
    return None if _ends(document.root, ending) else ""


def _ends(node: Node, ending: set[str]) -> bool:
    if node is True or "enum" in node:
        return True
    if "$ref" in node:
        return node["$ref"].removeprefix(DEFINITIONS) in ending
    if "allOf" in node:
        return all(_ends(one, ending) for one in node["allOf"])
    if "anyOf" in node:
        return any(_ends(one, ending) for one in node["anyOf"])
    return any(_type_ends(node, kind, ending) for kind in types(node))


def _type_ends(node: dict[str, Json], kind: str, ending: set[str]) -> bool:
    if kind == "array":
        low, prefix = node.get("minItems", 0), node.get("prefixItems", [])
        needed = [*prefix[:low], *([node.get("items", True)] if low > len(prefix) else [])]
    elif kind == "object":
        known = node.get("properties", {})
        needed = [known.get(name, node.get("additionalProperties", True)) for name in node.get("required", [])]
    else:
        needed = []
    return all(one is not False and _ends(one, ending) for one in needed)


def _leads_to(document: Document, node: Node, name: str, seen: set[str]) -> bool:
    """Returns whether the node leads to the named schema without any text in between."""
    if node is True:
        return False
    if "$ref" in node:
        other: str = node["$ref"].removeprefix(DEFINITIONS)
        if other == name or other in seen:
            return other == name
        seen.add(other)
        return _leads_to(document, document.named[other], name, seen)
    return any(_leads_to(document, one, name, seen) for one in (*node.get("anyOf", ()), *node.get("allOf", ())))


def excluding(document: Document, nodes: list[Node], left: list[int]) -> bool:
    """Returns whether no value satisfies two of the nodes, as far as their types and fixed values show. `left` is the
    number of comparisons that the schema may still cost, at first `MAX_COMPARISONS`.
    """
    return all(_exclude(document, one, other, left) for one, other in combinations(nodes, 2))


def _exclude(document: Document, one: Node, other: Node, left: list[int]) -> bool:
    """Compares two nodes. Nodes that are not decided when nothing is `left` count as not excluding each other."""
    one, other = document.followed(one), document.followed(other)
    left[0] -= 1 + (_num_values(one) + _num_values(other)) // _VALUES
    if left[0] < 0 or one is True or other is True:
        return False
    for first, second in ((one, other), (other, one)):
        if "anyOf" in first:
            return all(_exclude(document, part, second, left) for part in alternatives(first))
        if "allOf" in first:
            return any(_exclude(document, part, second, left) for part in first["allOf"])
    if _kinds(one).isdisjoint(_kinds(other)):
        return True
    if "enum" in one and "enum" in other:
        return all(map(_plain, (*one["enum"], *other["enum"]))) and set(one["enum"]).isdisjoint(other["enum"])
    return _kinds(one) == _kinds(other) == {"object"} and _objects_exclude(document, one, other, left)


def _objects_exclude(document: Document, one: dict[str, Json], other: dict[str, Json], left: list[int]) -> bool:
    """Returns whether a property that one of the objects needs cannot have a value that suits both."""
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    needed = {*one.get("required", ()), *other.get("required", ())}
    return any(
        name in mine and name in theirs and _exclude(document, mine[name], theirs[name], left) for name in needed
    )


def _num_values(node: Node) -> int:
    return len(node.get("enum", ())) if node is not True else 0


def _plain(value: Json) -> bool:
    return not isinstance(value, list | dict)


def _kinds(node: dict[str, Json]) -> set[str]:
    """Returns the types of values that the node allows. Integers are numbers."""
    found = map(_kind, node["enum"]) if "enum" in node else types(node)
    return {"number" if kind == "integer" else kind for kind in found}


def _kind(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "number"
