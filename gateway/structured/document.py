"""A JSON schema after reading: few kinds of nodes, each of which is again a JSON schema.

A node is `True` (any value), a reference, a list of values, `anyOf`, `allOf`, or a type with keywords of that type, and
it is only one of these. So whoever follows a schema asks in that order and knows the rest. Strings have no formats:
those became patterns. Values, no behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any as Json
from typing import Literal

Node = dict[str, Json] | Literal[True]

DEFINITIONS = "#/$defs/"


class SchemaError(ValueError):
    """A schema that cannot be enforced. `pointer` is the place, as a JSON pointer."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(message)
        self.pointer = pointer


@dataclass
class Document:
    """A schema, and the schemas that it refers to. A reference is `DEFINITIONS` and a name."""

    root: Node = True
    named: dict[str, Node] = field(default_factory=dict)

    def target(self, node: dict[str, Json]) -> Node:
        """Returns the node that a reference leads to."""
        return self.named[node["$ref"].removeprefix(DEFINITIONS)]

    def followed(self, node: Node) -> Node:
        """Returns the node at the end of a chain of references. No chain is circular in a sound document."""
        while node is not True and "$ref" in node:
            node = self.target(node)
        return node

    def renamed(self, prefix: str) -> Document:
        """Returns the document with this in front of all names, so that several fit into one schema."""

        def moved(value: Json) -> Json:
            if isinstance(value, list):
                return [moved(one) for one in value]
            if not isinstance(value, dict):
                return value
            if isinstance(name := value.get("$ref"), str):
                return {"$ref": DEFINITIONS + prefix + name.removeprefix(DEFINITIONS)}
            return {
                key: one if key in ("enum", "required") else _each(one, moved) if key == "properties" else moved(one)
                for key, one in value.items()
            }

        named = {prefix + name: moved(node) for name, node in self.named.items()}
        return Document(moved(self.root), named)

    def whole(self) -> dict[str, Json]:
        """Returns the document as one JSON schema."""
        return ({} if self.root is True else self.root) | {"$defs": self.named}


def _each(values: dict[str, Json], function: Callable[[Json], Json]) -> dict[str, Json]:
    return {name: function(value) for name, value in values.items()}


def types(node: dict[str, Json]) -> tuple[str, ...]:
    """Returns the types of a node that has a type."""
    given = node["type"]
    return (given,) if isinstance(given, str) else tuple(given)


def alternatives(node: Node) -> Iterator[Node]:
    """Yields the parts of `anyOf`, or the node itself."""
    yield from (node,) if node is True or "anyOf" not in node else node["anyOf"]


ANY_OBJECT: Node = {"type": "object"}
