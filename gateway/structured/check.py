"""Checks whether a finished text has the promised form. Pure.

This is a second opinion, not the enforcement: it reads values, where the grammar reads characters. Only the grammar
enforces patterns and formats, because matching a client's expression may never end.
"""

from __future__ import annotations

import json
from typing import Any as Json

from gateway.structured.nodes import (
    Any,
    Array,
    Boolean,
    Document,
    Either,
    Integer,
    Literals,
    Node,
    Null,
    Number,
    Object,
    Ref,
    String,
)


def is_valid(document: Document, text: str) -> bool:
    """Returns whether the text is JSON that satisfies the schema."""
    try:
        return accepts(document, document.root, json.loads(text))
    except (ValueError, RecursionError):
        return False


def accepts(document: Document, node: Node, value: Json) -> bool:
    match node:
        case Ref(name):
            return accepts(document, document.named[name], value)
        case Either(nodes):
            return any(accepts(document, one, value) for one in nodes)
        case Any():
            return True
        case Literals(values):
            return any(_same(one, value) for one in values)
        case Null():
            return value is None
        case Boolean():
            return isinstance(value, bool)
        case Number():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case Integer(low, high):
            return type(value) is int and low <= value <= high
        case String(low, high, _):
            return isinstance(value, str) and low <= len(value) <= _or_endless(high)
        case Array():
            return isinstance(value, list) and _array(document, node, value)
        case Object():
            return isinstance(value, dict) and _object(document, node, value)


def _array(document: Document, node: Array, value: list[Json]) -> bool:
    if not node.min_items <= len(value) <= _or_endless(node.max_items):
        return False
    size = len(node.prefix)
    rest = node.rest
    return (
        all(accepts(document, one, item) for one, item in zip(node.prefix, value, strict=False))
        and (rest is not None or len(value) <= size)
        and all(rest is not None and accepts(document, rest, item) for item in value[size:])
    )


def _object(document: Document, node: Object, value: dict[str, Json]) -> bool:
    known = {one.name: one.node for one in node.properties}
    if any(one.required and one.name not in value for one in node.properties):
        return False
    for name, item in value.items():
        inner = known.get(name, node.extra)
        if inner is None or not accepts(document, inner, item):
            return False
    return True


def _same(one: Json, other: Json) -> bool:
    """Compares two JSON values as texts, because Python takes True for 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _or_endless(high: int | None) -> float:
    return float("inf") if high is None else high
