"""The API's description covers every route and refers to nothing that is not there."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec
import pytest

from gateway.app import api_routes
from gateway.schema import openapi

DOCUMENT: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi.document(api_routes())))


def operation(route: Any) -> dict[str, Any]:
    path = re.sub(r"\{(\w+)(?::[^{}]*)?\}", r"{\1}", route.path)
    found: dict[str, Any] = DOCUMENT["paths"][path][route.method.lower()]
    return found


@pytest.mark.parametrize("route", api_routes(), ids=lambda route: f"{route.method} {route.path}")
def test_every_route_is_described_with_its_scope_and_parameters(route):
    described = operation(route)
    assert described["x-headgate-scope"] == route.scope
    assert described.get("x-headgate-or-scope") == route.or_scope
    assert bool(described["security"]) == (route.scope != "none")
    named = {parameter["name"] for parameter in described.get("parameters", [])}
    assert named == set(re.findall(r"\{(\w+)", route.path))
    assert ("requestBody" in described) == (route.takes is not None)


@pytest.mark.parametrize("route", api_routes(), ids=lambda route: f"{route.method} {route.path}")
def test_every_operation_has_a_sentence_of_its_handlers_docstring_as_its_summary(route):
    summary = operation(route)["summary"]
    assert re.fullmatch(r"[A-Z][a-z]+s [^\n]+\.", summary), summary
    assert (route.handler.__doc__ or "").startswith(summary)


def test_whatever_reads_a_body_says_what_it_takes():
    readers = ("json_object(request)", "convert(", "known_of(", "_fields(")
    silent = [
        f"{route.method} {route.path}"
        for route in api_routes()
        if route.method in ("POST", "PUT", "PATCH")
        and route.takes is None
        and any(reader in inspect.getsource(route.handler) for reader in readers)
    ]
    assert silent == []


def test_no_body_of_an_endpoint_of_our_own_has_members_that_are_dropped():
    own = ("/admin/", "/v1/keys", "/v1/webhooks", "/v1/quotes", "/v1/batches/estimate")
    bodies = [route.takes for route in api_routes() if route.path.startswith(own) and route.takes is not None]
    assert len(bodies) > 20
    _, parts = msgspec.json.schema_components(bodies)
    open_parts = {name for name, one in parts.items() if one.get("additionalProperties", True) and "properties" in one}
    assert open_parts == {"ExpiresAfter"}, "an object of OpenAI's inside of the body of an estimate"


def test_budgets_and_quotas_are_described_with_their_bounds():
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["BudgetFields"]["required"] == ["project_id", "period", "limit_micro_units"]
    limit = schemas["BudgetFields"]["properties"]["limit_micro_units"]
    assert (limit["minimum"], limit["maximum"]) == (0, 2**53 - 1)
    assert "end_user" in schemas["QuotaFields"]["properties"]["level"]["enum"]


def test_operations_have_names_of_their_own():
    names = [operation(route)["operationId"] for route in api_routes()]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere():
    text = msgspec.json.encode(DOCUMENT).decode()
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert referred
    assert referred <= set(DOCUMENT["components"]["schemas"])


def test_bodies_carry_the_bounds_that_the_gateway_checks():
    schemas = DOCUMENT["components"]["schemas"]
    rotation = schemas["Rotation"]["properties"]["overlap_seconds"]
    assert (rotation["minimum"], rotation["maximum"]) == (0, 604_800)
    assert "model" in schemas["ChatFields"]["required"]
    for kind in ("ChatFields", "CompletionFields"):
        (words,) = (one for one in schemas[kind]["properties"]["bad_words"]["anyOf"] if "items" in one)
        assert words["maxItems"] == 128
        assert (words["items"]["minLength"], words["items"]["maxLength"]) == (1, 100)
        assert "allowed_token_ids" in schemas[kind]["properties"]
    assert schemas["ErrorBody"]["required"] == ["message", "type", "param", "code"]
