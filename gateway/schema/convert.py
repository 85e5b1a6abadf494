"""Converts one JSON object to one frozen struct, with the field's path in errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.base import errors
from gateway.schema import forms

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)


class OwnBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an endpoint of Headgate's own, or an object inside of it. A member that it does not have is refused:
    whoever narrows a key or stops a tenant by a wrong name must not read that it was done. Bodies of other makers' APIs
    may have members that only their clients know.
    """


def convert(value: Mapping[str, Any], kind: type[T], where: str = "") -> T:
    """Converts a JSON object. A null counts as absent, but not where the name is unknown. Raises `ApiError` 400 that
    names the field, and in front of it the place of the object in its body, if `where` names one.
    """
    known = kind.__struct_encode_fields__
    present = {name: item for name, item in value.items() if item is not None or name not in known}
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise of_validation(str(error), where, kind) from None


def of_validation(text: str, where: str = "", kind: type[msgspec.Struct] | None = None) -> errors.ApiError:
    """Turns a validation error into an `ApiError`, whose parameter has the place `where` in front of it. The validator's
    text names types and ranges, and of the client's text only an unknown member.

    Whoever raises the error keeps it in no variable: its traceback holds the frame, and both would wait for the
    collector with all that the request has.
    """
    fault = _of_field(text, kind)
    if where:
        fault.param = f"{where}.{fault.param}" if fault.param else where
    return fault


def _of_field(text: str, kind: type[msgspec.Struct] | None) -> errors.ApiError:
    path = match["path"] if (match := _PATH.search(text)) else ""
    text = _PATH.sub("", text)
    if kind is not None and (unknown := _UNKNOWN.fullmatch(text)):
        return _unknown(unknown["name"], path, kind)
    if missing := _MISSING.match(text):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return errors.invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if form := forms.words_for(text):
        return errors.invalid(f"Invalid value for '{path}': it must be {form}.", path or None)
    code = "invalid_type" if text.startswith("Expected `") and ", got `" in text else "invalid_value"
    return errors.invalid(f"Invalid value for '{path}': {text}.", path or None, code)


def _unknown(name: str, path: str, kind: type[msgspec.Struct]) -> errors.ApiError:
    param = _safe(f"{path}.{name}" if path else name)
    if param is None:
        return errors.invalid("The body has an unknown parameter.", path or None, "unknown_parameter")
    meant = difflib.get_close_matches(name, _names_in(kind) if path else kind.__struct_encode_fields__, n=1)
    fault = errors.invalid(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    if meant and meant[0] != name:
        fault.message += f" Did you mean '{meant[0]}'?"
    return fault


def _names_in(kind: type[msgspec.Struct]) -> set[str]:
    """Returns the names of all members of a body and of the objects inside of it."""
    _, parts = msgspec.json.schema_components([kind])
    return {name for part in parts.values() for name in part.get("properties", ())}


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
    return path if len(path) <= 128 and re.fullmatch(r"[\w.\[\]-]+", path, re.ASCII) else None
