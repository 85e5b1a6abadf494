"""The parameters of the text endpoints: the reading of a body by the table (`gateway/schema/parameter_table.py`).

A known parameter is honoured, has no effect on the answer, or is refused with its name and its replacement. An unknown
one is ignored and named in a header. A parameter that is switched off is never refused, whatever it is. The module is
pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.base import errors
from gateway.schema.convert import convert, of_validation
from gateway.schema.parameter_table import PARAMETERS, Endpoint, Parameter

T = TypeVar("T", bound=msgspec.Struct)

MAX_IGNORED_NAMES = 10
_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


def _by_parent(endpoint: Endpoint) -> dict[str, dict[str, Parameter]]:
    """Returns the endpoint's parameters: path of the object that has them ("" for the body) → name → parameter."""
    found: dict[str, dict[str, Parameter]] = {"": {}}
    for parameter in PARAMETERS:
        if endpoint in parameter.endpoints:
            parent, _, name = parameter.path.rpartition(".")
            found.setdefault(parent, {})[name] = parameter
    return found


_KNOWN = {endpoint: _by_parent(endpoint) for endpoint in ("chat", "completions", "tokenize", "detokenize")}


def read(value: Mapping[str, Any], kind: type[T], endpoint: Endpoint) -> tuple[T, list[str]]:
    """Reads a body. Returns (its honoured fields, names of unknown ones). Raises `ApiError` 400."""
    ignored: list[str] = []
    honoured = _honoured(value, _KNOWN[endpoint], "", ignored)
    return convert(honoured, kind), ignored[:MAX_IGNORED_NAMES]


def check_others(
    value: Mapping[str, Any], honoured: frozenset[str], unsupported: Mapping[str, str], *, generates: bool = False
) -> list[str]:
    """Checks the fields of a body that has a struct of its own and is not read by the table: refuses those in
    `unsupported` (name → what to do instead), type-checks those that have no effect in chat either, and returns the
    names of unknown ones. An endpoint that `generates` refuses every other parameter of chat: it would change the
    answer. Raises `ApiError` 400.
    """
    ignored: list[str] = []
    for name, item in value.items():
        known = _KNOWN["chat"][""].get(name)
        if name in honoured or item is None:
            continue
        if name in unsupported:
            sentence = f"The parameter '{name}' is not supported. {unsupported[name]}".rstrip()
            raise errors.invalid(sentence, name, "unsupported_parameter")
        if known is not None and known.treatment == "no effect":
            _check_type(name, item, known.kind)
        elif known is not None and generates:
            if not known.is_off(item):
                raise _refusal(known)
        elif _NAME.fullmatch(name):
            ignored.append(name)
    return ignored[:MAX_IGNORED_NAMES]


def names_of(endpoint: Endpoint) -> frozenset[str]:
    """Returns the names of the endpoint's parameters that are honoured or refused, and so change an answer."""
    return frozenset(name for name, one in _KNOWN[endpoint][""].items() if one.treatment != "no effect")


def _honoured(
    value: Mapping[str, Any], known: Mapping[str, Mapping[str, Parameter]], parent: str, ignored: list[str]
) -> dict[str, Any]:
    """Returns what is honoured and switched on. Appends names of unknown fields to `ignored`."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        path = f"{parent}.{name}" if parent else name
        parameter = known[parent].get(name)
        if parameter is None:
            if item is not None and _NAME.fullmatch(name):
                ignored.append(path)
        elif parameter.is_off(item):
            continue
        elif parameter.treatment == "refused":
            raise _refusal(parameter)
        elif parameter.treatment == "no effect":
            _check_type(path, item, parameter.kind)
        elif path in known and isinstance(item, dict):
            inner = _honoured(item, known, path, ignored)
            if inner or parameter.empty_counts:
                found[name] = inner
        else:
            found[name] = item
    return found


def unknown_in(value: Mapping[str, Any], kind: type[msgspec.Struct]) -> list[str]:
    """Returns the unknown names of a body that is read by its struct alone, those of the objects in it as
    `object.field`.
    """
    fields = {one.encode_name: one.type for one in msgspec.structs.fields(kind)}
    found = [name for name, item in value.items() if name not in fields and item is not None and _NAME.fullmatch(name)]
    parts = {name: one for name, one in fields.items() if isinstance(one, type) and issubclass(one, msgspec.Struct)}
    return (found + unknown_inside(value, parts, {}))[:MAX_IGNORED_NAMES]


def unknown_inside(
    value: Mapping[str, Any], parts: Mapping[str, type[msgspec.Struct]], unsupported: Mapping[str, str]
) -> list[str]:
    """Returns the unknown fields of a body's objects as `object.field`; `parts` has the struct of each object. Refuses
    those in `unsupported`, by the same names. Raises `ApiError` 400.
    """
    found: list[str] = []
    for parent, kind in parts.items():
        part = value.get(parent)
        for name, item in part.items() if isinstance(part, dict) else ():
            path = f"{parent}.{name}"
            if name in kind.__struct_fields__ or item in (None, False, "", [], {}):
                continue
            if path in unsupported:
                sentence = f"The parameter '{path}' is not supported. {unsupported[path]}".rstrip()
                raise errors.invalid(sentence, path, "unsupported_parameter")
            if _NAME.fullmatch(name):
                found.append(path)
    return found


def _refusal(parameter: Parameter) -> errors.ApiError:
    note = "It is a parameter of /v1/chat/completions." if parameter.treatment == "honoured" else parameter.note
    sentence = f"The parameter '{parameter.path}' is not supported. {note}".rstrip()
    return errors.invalid(sentence, parameter.path, "unsupported_parameter")


def _check_type(path: str, item: Any, kind: Any) -> None:
    try:
        msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise of_validation(f"{error} - at `$.{path}`") from None
