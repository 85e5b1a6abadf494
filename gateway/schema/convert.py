"""Converts one JSON object to one frozen struct, with the field's path in errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.base import errors
from gateway.schema import forms

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def convert(value: Mapping[str, Any], kind: type[T], where: str = "") -> T:
    """Converts a JSON object. A null counts as absent. Raises `ApiError` 400 that names the field, and in front of it
    the place of the object in its body, if `where` names one.
    """
    present = {name: item for name, item in value.items() if item is not None}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise of_validation(str(error), where) from None


def of_validation(text: str, where: str = "") -> errors.ApiError:
    """Turns a validation error into an `ApiError`, whose parameter has the place `where` in front of it. The validator's
    text names types and ranges only, never a value of the client's.

    Whoever raises the error keeps it in no variable: its traceback holds the frame, and both would wait for the
    collector with all that the request has.
    """
    fault = _of_field(text)
    if where:
        fault.param = f"{where}.{fault.param}" if fault.param else where
    return fault


def _of_field(text: str) -> errors.ApiError:
    path = match["path"] if (match := _PATH.search(text)) else ""
    text = _PATH.sub("", text)
    if missing := _MISSING.match(text):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return errors.invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if form := forms.words_for(text):
        return errors.invalid(f"Invalid value for '{path}': it must be {form}.", path or None)
    code = "invalid_type" if text.startswith("Expected `") and ", got `" in text else "invalid_value"
    return errors.invalid(f"Invalid value for '{path}': {text}.", path or None, code)


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
