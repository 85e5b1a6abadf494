"""A JSON schema after reading: few kinds of nodes, no optional parts in them, references by name.
Values, no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any as Json


@dataclass(frozen=True)
class Any:
    """Every JSON value."""


@dataclass(frozen=True)
class Literals:
    """Exactly one of these values; none of them is preferred."""

    values: tuple[Json, ...]


@dataclass(frozen=True)
class Null:
    pass


@dataclass(frozen=True)
class Boolean:
    pass


@dataclass(frozen=True)
class Number:
    pass


@dataclass(frozen=True)
class Integer:
    low: int
    high: int


@dataclass(frozen=True)
class String:
    """A string with its length in characters. A pattern excludes bounds of the length, and is already a grammar
    (regex.inside_json).
    """

    min_length: int = 0
    max_length: int | None = None
    inside: str | None = None


@dataclass(frozen=True)
class Array:
    prefix: tuple[Node, ...]
    rest: Node | None
    """The node of the items after the prefix. None means that there are none."""
    min_items: int
    max_items: int | None


@dataclass(frozen=True)
class Property:
    name: str
    node: Node
    required: bool


@dataclass(frozen=True)
class Object:
    properties: tuple[Property, ...]
    extra: Node | None
    """The node of properties that are not listed. None means that there are none."""


@dataclass(frozen=True)
class Either:
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Ref:
    name: str


Node = Any | Literals | Null | Boolean | Number | Integer | String | Array | Object | Either | Ref


@dataclass
class Document:
    """A schema, and the schemas that it refers to."""

    root: Node = field(default_factory=Any)
    named: dict[str, Node] = field(default_factory=dict)


ANY_OBJECT = Object((), Any())


def followed(document: Document, node: Node) -> Node:
    """Returns the node that a reference leads to; no chain of references is circular."""
    while isinstance(node, Ref):
        node = document.named[node.name]
    return node
