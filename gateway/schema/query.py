"""Reads query parameters as values, with the parameter's name in the error. It knows no route."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

from multidict import MultiMapping

from gateway.base import errors

Query = MultiMapping[str]

_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
_BOOLEANS: Mapping[str, bool] = {"true": True, "false": False}


def text(query: Query, name: str) -> str | None:
    """Returns a parameter's value. A parameter given twice is an error: it is unclear which value was meant. So is a
    null character, which is in no text of PostgreSQL.
    """
    values = query.getall(name, [])
    if len(values) > 1:
        raise errors.invalid(f"'{name}' was given more than once.", name)
    _refuse_null(name, values)
    return values[0] if values else None


def _refuse_null(name: str, values: Sequence[str]) -> None:
    if any("\0" in value for value in values):
        raise errors.invalid(f"'{name}' must not contain a null character.", name)


def integer(query: Query, name: str) -> int | None:
    value = text(query, name)
    if value is None:
        return None
    if not _INTEGER.fullmatch(value):
        raise errors.invalid(f"'{name}' must be an integer.", name, "invalid_type")
    return int(value)


def refuse_empty_span(start: int | None, end: int | None) -> None:
    """Refuses a span of time in which nothing can lie, because it ends before its start or with it."""
    if start is not None and end is not None and start >= end:
        raise errors.invalid("'start_time' must lie before 'end_time'.", "start_time")


def boolean(query: Query, name: str) -> bool | None:
    value = text(query, name)
    if value is None:
        return None
    if value not in _BOOLEANS:
        raise errors.invalid(f"'{name}' must be true or false.", name, "invalid_type")
    return _BOOLEANS[value]


def choice(query: Query, name: str, choices: Sequence[str]) -> str | None:
    value = text(query, name)
    if value is not None and value not in choices:
        raise errors.invalid(f"'{name}' must be one of {', '.join(choices)}.", name)
    return value


def array(query: Query, name: str) -> tuple[str, ...] | None:
    """Returns the values of `name[]=a&name[]=b`, or of the plain name repeated; None if there are none."""
    values = [*query.getall(f"{name}[]", []), *query.getall(name, [])]
    _refuse_null(name, values)
    return tuple(values) if values else None


def limit(query: Query, default: int, most: int) -> int:
    value = integer(query, "limit")
    if value is None:
        return default
    if not 1 <= value <= most:
        raise errors.invalid(f"'limit' must be 1 to {most}.", "limit")
    return value


class Page(TypedDict):
    after: str | None
    limit: int


def page(query: Query) -> Page:
    """Returns which page of a list is asked for."""
    return Page(after=text(query, "after"), limit=limit(query, 20, 100))


def refuse_unknown(query: Query, known: Collection[str]) -> None:
    for name in query:
        if name.removesuffix("[]") not in known:
            raise errors.invalid("A query parameter is not known to this endpoint.", code="invalid_value")
