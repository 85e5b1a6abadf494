"""Writes docs/api-reference.md from the served description (`GET /openapi.json`): every endpoint for programs.

`make api-reference` writes the page; a test fails when it is not current.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.app import api_routes
from gateway.schema import openapi

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api-reference.md"
BEGIN, END = "<!-- endpoints: begin (made by `make api-reference`) -->", "<!-- endpoints: end -->"
PROJECTS = "/v1/organization/projects"
AREAS: Sequence[tuple[str, Sequence[str]]] = (
    ("Probes and description", ("/livez", "/readyz", "/health", "/openapi.json")),
    ("Messages", ("/v1/messages",)),
    ("Generation", ("/v1/chat", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/v1/quotes")),
    ("Responses", ("/v1/responses",)),
    ("Vectors and scores", ("/v1/embeddings", "/v1/rerank", "/v1/score")),
    ("Files and batches", ("/v1/files", "/v1/batches", "/admin/v1/batches")),
    ("Keys", ("/v1/keys", "/admin/v1/keys", "/admin/v1/leaked-keys", "/v1/organization/admin_api_keys")),
    ("Webhooks", ("/v1/webhooks", "/admin/v1/webhooks")),
    ("Spend limits and alerts", (f"{PROJECTS}/{{project_id}}/spend", "/v1/organization/spend")),
    ("Projects", (PROJECTS,)),
    (
        "Usage, sessions and the request log",
        (
            *(
                f"{root}/{what}"
                for root in ("/v1", "/admin/v1")
                for what in ("usage", "requests", "sessions", "anomalies")
            ),
            "/v1/organization/usage",
            "/v1/organization/costs",
            "/v1/organization/audit_logs",
        ),
    ),
    ("Limits and budgets", ("/admin/v1/budgets", "/admin/v1/quotas", "/v1/me", "/admin/v1/tenants/{tenant_id}/limits")),
    (
        "Prices, invoices and books",
        (
            "/admin/v1/price-sheets",
            "/admin/v1/tenants/{tenant_id}/price-sheet",
            "/admin/v1/tenants/{tenant_id}/billing",
            "/admin/v1/tenants/{tenant_id}/invoice-preview",
            "/admin/v1/invoices",
            "/admin/v1/credits",
            "/admin/v1/exports",
            "/admin/v1/issuer",
            "/v1/invoice",
            "/v1/credits",
            "/admin/v1/books",
            "/admin/v1/verify-books",
        ),
    ),
    ("Tenants", ("/admin/v1/tenants",)),
    (
        "Workers, upstreams and caches",
        (
            "/admin/v1/workers",
            "/admin/v1/upstreams",
            "/admin/v1/adapters",
            "/admin/v1/prefixes",
            "/admin/v1/cache",
            "/admin/v1/fairness",
            "/admin/v1/settings",
        ),
    ),
)
"""The areas in the page's order, with the beginnings of their paths. A path is of the area with the longest one."""
WHO = {
    "none": "anyone",
    "any": "any tenant key",
    "admin": "operator",
    "usage:read": "`usage:read`, operator",
    "run": "jobs processes",
}
"""Words for scopes; another scope is that of a tenant key and stands as itself."""


def tables() -> str:
    document = openapi.document(api_routes())
    by_area: dict[str, list[tuple[str, str, dict[str, Any]]]] = {name: [] for name, _ in AREAS}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_area[area(path)].append((method.upper(), path, operation))
    schemas = document["components"]["schemas"]
    shown: set[str] = set()
    lines: list[str] = []
    for name, found in by_area.items():
        lines += [f"## {name}", "", *_operations(found), ""]
        for body in dict.fromkeys(filter(None, (_body(operation) for *_, operation in found))):
            if body not in shown:
                shown.add(body)
                lines += _fields(body, schemas[body])
    lines += ["## Parts of bodies", ""]
    for part in sorted(_reached(shown, schemas) - shown):
        lines += _fields(part, schemas[part])
    return "\n".join(lines).rstrip()


def area(path: str) -> str:
    """Returns the area of a path. Raises ValueError for a path of none: a new family of paths needs an area."""
    fits = [(len(start), name) for name, starts in AREAS for start in starts if path.startswith(start)]
    if not fits:
        raise ValueError(f"{path} is in no area of ops/api_reference.py")
    return max(fits)[1]


def _operations(found: Iterable[tuple[str, str, dict[str, Any]]]) -> Iterator[str]:
    yield "| method and path | who | body | what it does | answer |"
    yield "|---|---|---|---|---|"
    for method, path, operation in found:
        body = _body(operation)
        scope = operation["x-headgate-scope"]
        instead = f" or `{operation['x-headgate-or-scope']}`" if "x-headgate-or-scope" in operation else ""
        cells = [
            f"`{method} {path}`",
            WHO.get(scope, f"`{scope}`") + instead,
            _link(body) if body else "",
            _cell(operation["summary"]),
            _answer(operation),
        ]
        yield f"| {' | '.join(cells)} |"


def _answer(operation: Mapping[str, Any]) -> str:
    content = operation["responses"]["200"]["content"]
    if "application/octet-stream" in content:
        return "bytes"
    return "JSON, or events" if "text/event-stream" in content else "JSON"


def _body(operation: Mapping[str, Any]) -> str | None:
    if "requestBody" not in operation:
        return None
    return _name(operation["requestBody"]["content"]["application/json"]["schema"])


def _fields(name: str, schema: Mapping[str, Any]) -> list[str]:
    lines = [f"### {_title(name)}", ""]
    rows = schema.get("properties", {})
    if not rows:
        return [*lines, f"{_type(schema)}.", ""]
    lines += ["| field | type | default |", "|---|---|---|"]
    needed = schema.get("required", ())
    for field, one in rows.items():
        default = "**required**" if field in needed else _default(one)
        lines.append(f"| `{field}` | {_type(one)} | {default} |")
    return [*lines, ""]


def _default(schema: Mapping[str, Any]) -> str:
    return "" if schema.get("default") is None else f"`{json.dumps(schema['default'])}`"


def _type(schema: Mapping[str, Any]) -> str:
    """Returns the type in words. Absent and null are the same in a body, so null is not named."""
    if name := _name(schema):
        return _link(name)
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"] if value is not None)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(one) for one in choices if one.get("type") != "null"))
    kind = schema.get("type", "any JSON")
    if kind == "array":
        inner = schema.get("items")
        return f"list of {_type(inner)}" if isinstance(inner, Mapping) and inner else "list"
    return " ".join([kind, *_bounds(schema)])


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None or most is not None:
        yield f"{'' if least is None else least}…{'' if most is None else most}"
    if (length := schema.get("maxLength")) is not None:
        yield f"of at most {length} characters"


def _reached(names: Iterable[str], schemas: Mapping[str, Any]) -> set[str]:
    """Returns the names with those that their schemas refer to, directly or not."""
    known: set[str] = set()
    ahead = list(names)
    while ahead:
        name = ahead.pop()
        if name not in known:
            known.add(name)
            ahead += _references(schemas[name])
    return known


def _references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if (name := _name(value)) is not None:
            yield name
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _name(schema: Mapping[str, Any]) -> str | None:
    reference = schema.get("$ref")
    return reference.rpartition("/")[2] if isinstance(reference, str) else None


def _link(name: str) -> str:
    return f"[{_title(name)}](#{_title(name).lower().replace(' ', '-')})"


def _title(name: str) -> str:
    """Returns `keys NewKey` for one of two bodies of that name, which the description tells apart by their modules."""
    return " ".join(name.split(".")[-2:])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def page(text: str) -> str:
    """Returns the page with the tables of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
