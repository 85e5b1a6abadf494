"""Converts one JSON object to one frozen struct, with the field's path in errors, and handles other fields.

There are four classes of fields (api.md 1.2): honoured (the struct's own), without effect on the output (type-checked,
ignored), unsupported (400), unknown (ignored and named in a header).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.base import errors
from gateway.schema import forms

T = TypeVar("T", bound=msgspec.Struct)

MAX_IGNORED_NAMES = 10
_PATH = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")

# Fields that have no effect on any route: name → type to check.
NO_EFFECT: Mapping[str, Any] = {
    "store": bool | None,
    "user": str | None,
    "safety_identifier": str | None,
    "verbosity": str | None,
    "prediction": dict[str, Any] | None,
    "prompt_cache_retention": str | None,
    "prompt_cache_options": dict[str, Any] | None,
    "priority": int | None,
}


def convert(value: Mapping[str, Any], kind: type[T]) -> T:
    """Converts a JSON object. A null counts as absent. Raises `ApiError` 400 that names the field."""
    present = {name: item for name, item in value.items() if item is not None}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise of_validation(str(error)) from None


def of_validation(text: str) -> errors.ApiError:
    """Turns a validation error into an `ApiError`. The validator's text names types and ranges only, never a value of
    the client's.
    """
    path = match["path"] if (match := _PATH.search(text)) else ""
    text = _PATH.sub("", text)
    if missing := _MISSING.match(text):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return errors.invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if form := forms.words_for(text):
        return errors.invalid(f"Invalid value for '{path}': it must be {form}.", path or None)
    code = "invalid_type" if text.startswith("Expected `") and ", got `" in text else "invalid_value"
    return errors.invalid(f"Invalid value for '{path}': {text}.", path or None, code)


def check_other_fields(value: Mapping[str, Any], honoured: frozenset[str], unsupported: Mapping[str, str]) -> list[str]:
    """Refuses unsupported fields, type-checks those without effect, and returns the names of unknown ones."""
    ignored: list[str] = []
    for name, item in value.items():
        if name in honoured or item is None:
            continue
        if name in NO_EFFECT:
            _check_type(name, item, NO_EFFECT[name])
        elif name in unsupported or name.startswith("guided_"):
            hint = unsupported.get(name, "Use 'structured_outputs' instead.")
            raise errors.invalid(
                f"The parameter '{name}' is not supported. {hint}".rstrip(), name, "unsupported_parameter"
            )
        elif _NAME.fullmatch(name):
            ignored.append(name)
    return ignored[:MAX_IGNORED_NAMES]


def _check_type(name: str, item: Any, kind: Any) -> None:
    try:
        msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise of_validation(f"{error} - at `$.{name}`") from None


def refuse_deep(value: Any, names: frozenset[str], path: str = "") -> None:
    """Refuses fields that must not appear anywhere in a body. The body's depth is bounded."""
    if isinstance(value, dict):
        for name, item in value.items():
            where = f"{path}.{name}" if path else str(name)
            if name in names and item is not None:
                raise errors.invalid("Chat templates come from the model only.", _safe(where), "unsupported_parameter")
            refuse_deep(item, names, where)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict | list):
                refuse_deep(item, names, f"{path}[{index}]")


def _safe(path: str) -> str | None:
    return path if len(path) <= 128 and re.fullmatch(r"[\w.\[\]]+", path, re.ASCII) else None
