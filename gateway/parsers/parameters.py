"""Arguments that a model writes one by one, each between tags: they become one JSON object, each as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.parsers import json_call
from gateway.parsers.scan import Scan, Wait, json_text


@dataclass(frozen=True)
class ParameterTags:
    """The tags around a name and its value."""

    key: str
    key_end: str
    value: str
    """The tag in front of the value; "" where the name's end is it. What stands between the two are attributes."""
    value_end: str
    ends: tuple[str, ...]
    """The tags behind the last parameter."""
    on_lines: bool = True
    """Whether a line break beside a value belongs to the tags."""


def arguments(scan: Scan, name: str, tags: ParameterTags) -> Wait[str]:
    """Begins a call and writes its parameters. Returns the tag that ended them; "" if the output was cut before."""
    scan.begin(name)
    known = scan.tools.schema_of(name).get("properties")
    schemas: Mapping[str, Any] = known if isinstance(known, dict) else {}
    before, seen = "{", set[str]()
    while (tag := (yield from scan.up_to((tags.key, *tags.ends), _ignore))) == tags.key:
        key = (yield from scan.before(tags.key_end))[0].strip()
        attributes = (yield from scan.before(tags.value))[0] if tags.value else ""
        if key in seen:
            yield from scan.up_to((tags.value_end,), _ignore)
            continue
        seen.add(key)
        scan.argument(f"{before}{json_text(key)}: ")
        before = ", "
        types = _stated(attributes, _types(schemas.get(key)))
        if not (yield from _value(scan, types, tags)):
            return ""
    if tag:
        scan.argument("{}" if before == "{" else "}")
        scan.complete()
    return tag


def _stated(attributes: str, types: set[str]) -> set[str]:
    """Returns the types of a value whose tag may say whether it is a string (DeepSeek V3.2)."""
    if 'string="true"' in attributes:
        return {"string"}
    return types - {"string"} if 'string="false"' in attributes else types


def _value(scan: Scan, types: set[str], tags: ParameterTags) -> Wait[bool]:
    """Writes one value up to its end tag. A string is written as it comes; other values once they are whole."""
    ends: tuple[str, ...] = (tags.value_end,)
    if tags.on_lines:
        yield from scan.accept("\n")
        ends = (f"\n{tags.value_end}", tags.value_end)
    if types == {"string"}:
        return (yield from scan.string(*ends))
    text, tag = yield from scan.before(*ends)
    if tag:
        scan.argument(_written(text, types))
    return bool(tag)


def _written(text: str, types: set[str]) -> str:
    """Returns a parameter's text as JSON. A value that JSON cannot say is the text itself."""
    try:
        return json_text(_typed(text, types))
    except (ValueError, RecursionError):
        return json_text(text)


def _types(schema: Any) -> set[str]:
    """Returns the types that a schema names; none for one that names none."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else {one for one in _listed(given) if isinstance(one, str)}
    for one in _listed(schema.get("anyOf")) or _listed(schema.get("oneOf")):
        found |= _types(one)
    values = schema.get("enum")
    if not found and isinstance(values, list) and values and all(isinstance(one, str) for one in values):
        return {"string"}
    return found


def _listed(value: Any) -> list[Any]:
    """Returns a list of a client's schema; an empty one for any other value, because nobody has checked the schema."""
    return value if isinstance(value, list) else []


def _typed(text: str, types: set[str]) -> Any:
    """Returns the JSON value that a parameter's text means; a text that is none is a string."""
    text = text.strip() if types and "string" not in types else text
    if "string" in types and text.strip() not in ("null", "None"):
        return text
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    found = json_call.decoded(word)
    is_null = word == "null" and (not types or "null" in types)
    if found is None:
        return None if is_null else text
    return found


def _ignore(text: str) -> None:
    pass
