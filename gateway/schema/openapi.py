"""OpenAPI 3.1 from the route table and the bodies' own types, so that it always matches what is served. The module is
pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.base.errors import ErrorBody
from gateway.http.route_table import Route

TITLE = "Headgate"
VERSION = "1"
"""The version of the API; the program's version is not public."""
REFERENCE = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
_STREAMS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
"""The shape of each event of a stream: before OpenAPI 3.2 the schema of an event stream describes that."""


class Failure(msgspec.Struct):
    """The body of every answer that is no success."""

    error: ErrorBody


def document(routes: Sequence[Route]) -> dict[str, Any]:
    bodies = [route.takes for route in routes if route.takes is not None]
    kinds: list[type] = list(dict.fromkeys([Failure, *bodies]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    references = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
        operations[route.method.lower()] = _operation(route, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, references: dict[type, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": _summary(route),
        "x-headgate-scope": route.scope,
        **({"x-headgate-or-scope": route.or_scope} if route.or_scope else {}),
        "security": [] if route.scope == "none" else [{"key": []}],
        "responses": {
            "200": {"description": "Done.", "content": _content(route)},
            "default": _answer("Refused or failed.", references[Failure]),
        },
    }
    if names := _PARAMETER.findall(route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _json(references[route.takes])}
    return operation


def _summary(route: Route) -> str:
    """Returns the first line of the handler's docstring."""
    return (route.handler.__doc__ or "").partition("\n")[0]


def _operation_id(route: Route) -> str:
    """Returns an id that is unique, as the pair of method and path is."""
    words = re.findall(r"[A-Za-z0-9]+", _PARAMETER.sub(r"by_\1", route.path))
    return "_".join([route.method.lower(), *words])


def _content(route: Route) -> dict[str, Any]:
    if route.path.endswith("/content"):
        return {"application/octet-stream": {}}
    content = _json({"type": "object"})
    if route.path in _STREAMS:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": _json(schema)}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
