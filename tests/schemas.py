"""JSON schemas drawn at random, and what satisfies them, read from the schema itself."""

from __future__ import annotations

import json

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "ab", "é", 'q"', "", "long name"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text('ab"\\\né', max_size=4))


def bounded(kind, low, high):
    return st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda pair: {"type": kind, low: min(pair), high: max(pair)}
    )


LEAVES = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("null", "boolean", "integer", "number", "string")]),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    bounded("string", "minLength", "maxLength"),
    st.tuples(st.integers(-1200, 1200), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ),
    st.sampled_from(["date", "ipv4", "uuid", "time"]).map(lambda name: {"type": "string", "format": name}),
)


def objects(inner):
    return st.builds(
        lambda properties, required, extra: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
            "additionalProperties": extra,
        },
        st.dictionaries(NAMES, inner, max_size=4),
        st.sets(NAMES),
        st.one_of(st.just(False), inner),
    )


def arrays(inner):
    return st.builds(
        lambda sizes, prefix, items: sizes | {"prefixItems": prefix, "items": items},
        bounded("array", "minItems", "maxItems"),
        st.lists(inner, max_size=2),
        inner,
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner), arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=6,
)


def satisfies(schema, value):
    """Plain JSON Schema for what is drawn here, read from the schema itself."""
    if "anyOf" in schema:
        return any(satisfies(part, value) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return json.dumps(value) in map(json.dumps, known)
    kind = schema["type"]
    if kind == "object":
        if not isinstance(value, dict) or not set(schema["required"]) <= set(value):
            return False
        extra = schema["additionalProperties"]
        inner = {name: schema["properties"].get(name, extra) for name in value}
        return all(part is not False and satisfies(part, value[name]) for name, part in inner.items())
    if kind == "array":
        if not isinstance(value, list) or not schema["minItems"] <= len(value) <= schema["maxItems"]:
            return False
        prefix = schema["prefixItems"]
        parts = prefix[: len(value)] + [schema["items"]] * (len(value) - len(prefix))
        return all(satisfies(part, item) for part, item in zip(parts, value, strict=True))
    if kind == "string":
        return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 999)
    if kind == "integer":
        return type(value) is int and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    kinds = {"null": type(None), "boolean": bool, "number": (int, float)}
    return isinstance(value, kinds[kind]) and (kind != "number" or not isinstance(value, bool))


def declared_once(schema):
    """Returns a hook for a JSON reader that refuses a declared name that comes twice. Names that the schema leaves free
    may come again: a grammar does not remember which of them it wrote, and parsers keep the last."""
    declared = set(_declared(schema))

    def hook(pairs):
        names = [name for name, _ in pairs if name in declared]
        assert len(set(names)) == len(names), "a declared name twice"
        return dict(pairs)

    return hook


def _declared(schema):
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for part in schema.values():
            yield from _declared(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _declared(part)
