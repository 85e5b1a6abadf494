"""The checks of a whole schema before a grammar is made of it: it must end, and `oneOf` must be decided. Pure."""

from __future__ import annotations

from itertools import combinations
from typing import Any as Json

from gateway.structured.nodes import (
    Any,
    Array,
    Boolean,
    Document,
    Either,
    Literals,
    Node,
    Null,
    Object,
    Ref,
    String,
    followed,
)

MAX_COMPARISONS = 10_000
"""The most comparisons for one `oneOf`."""


def termless(document: Document) -> str | None:
    """Returns the pointer of a named schema, or "" for the root, that no finite value satisfies or that refers only to
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
    match node:
        case Ref(name):
            return name in ending
        case Either(nodes):
            return any(_ends(one, ending) for one in nodes)
        case Array(prefix, rest, low, _):
            needed = [*prefix[:low], *([rest] if rest and low > len(prefix) else [])]
            return all(_ends(one, ending) for one in needed)
        case Object(properties, _):
            return all(_ends(one.node, ending) for one in properties if one.required)
        case _:
            return True


def _leads_to(document: Document, node: Node, name: str, seen: set[str]) -> bool:
    """Returns whether the node leads to the named schema without any text in between."""
    match node:
        case Ref(other):
            if other == name:
                return True
            if other in seen:
                return False
            seen.add(other)
            return _leads_to(document, document.named[other], name, seen)
        case Either(nodes):
            return any(_leads_to(document, one, name, seen) for one in nodes)
        case _:
            return False


def excluding(document: Document, nodes: list[Node]) -> bool:
    """Returns whether no value satisfies two of the nodes, as far as their types and fixed values show."""
    left = [MAX_COMPARISONS]
    return all(_exclude(document, one, other, left) for one, other in combinations(nodes, 2))


def _exclude(document: Document, one: Node, other: Node, left: list[int]) -> bool:
    """Compares two nodes. `left` is the number of comparisons that may still be made. Nodes that are not decided by
    then count as not excluding each other.
    """
    one, other = followed(document, one), followed(document, other)
    left[0] -= 1
    if left[0] < 0:
        return False
    if isinstance(one, Either):
        return all(_exclude(document, part, other, left) for part in one.nodes)
    if isinstance(other, Either):
        return _exclude(document, other, one, left)
    if _kinds(one).isdisjoint(_kinds(other)):
        return True
    if isinstance(one, Literals) and isinstance(other, Literals):
        return all(_plain(a) and _plain(b) and a != b for a in one.values for b in other.values)
    if isinstance(one, Object) and isinstance(other, Object):
        others = {two.name: two for two in other.properties}
        return any(
            (first.required or others[first.name].required)
            and _exclude(document, first.node, others[first.name].node, left)
            for first in one.properties
            if first.name in others
        )
    return False


def _plain(value: Json) -> bool:
    return not isinstance(value, list | dict)


def _kinds(node: Node) -> frozenset[str]:
    match node:
        case Any():
            return frozenset({"null", "boolean", "string", "number", "array", "object"})
        case Literals(values):
            return frozenset(map(_kind, values))
        case Null():
            return frozenset({"null"})
        case Boolean():
            return frozenset({"boolean"})
        case String():
            return frozenset({"string"})
        case Array():
            return frozenset({"array"})
        case Object():
            return frozenset({"object"})
        case _:
            return frozenset({"number"})


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
