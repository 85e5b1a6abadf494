"""Every route against every identity. A route that is not listed here fails the build."""

from __future__ import annotations

import pytest

from accounting.values.types import Principal
from gateway.app import routes
from gateway.http.middleware import allows
from gateway.http.route_table import Route

TENANT_SCOPES = {"chat", "embeddings", "batch", "files:read", "files:write", "usage:read", "keys"}

LISTED = {
    "GET /livez": "none",
    "GET /readyz": "none",
    "GET /health": "none",
    "GET /openapi.json": "none",
    "GET /v1/models": "any",
    "GET /v1/me/limits": "any",
    "GET /v1/models/{id:.+}": "any",
    "POST /v1/chat/completions": "chat",
    "POST /v1/messages": "chat",
    "POST /v1/messages/count_tokens": "chat",
    "POST /v1/messages/batches": "batch",
    "GET /v1/messages/batches": "batch",
    "GET /v1/messages/batches/{batch}": "batch",
    "POST /v1/messages/batches/{batch}/cancel": "batch",
    "GET /v1/messages/batches/{batch}/results": "batch",
    "DELETE /v1/messages/batches/{batch}": "batch",
    "POST /v1/completions": "chat",
    "POST /v1/responses": "chat",
    "GET /v1/responses": "chat",
    "POST /v1/responses/input_tokens": "chat",
    "POST /v1/responses/compact": "chat",
    "GET /v1/responses/{response_id}": "chat",
    "DELETE /v1/responses/{response_id}": "chat",
    "GET /v1/responses/{response_id}/input_items": "chat",
    "POST /v1/responses/{response_id}/cancel": "chat",
    "POST /v1/responses/{response_id}/run": "run",
    "POST /v1/embeddings": "embeddings",
    "POST /v1/rerank": "embeddings",
    "POST /v1/score": "embeddings",
    "POST /v1/quotes": "any",
    "POST /tokenize": "chat",
    "POST /detokenize": "chat",
    "POST /v1/files": "files:write",
    "GET /v1/files": "files:read",
    "GET /v1/files/{file}": "files:read",
    "GET /v1/files/{file}/content": "files:read",
    "DELETE /v1/files/{file}": "files:write",
    "POST /v1/batches": "batch",
    "POST /v1/batches/estimate": "batch",
    "GET /v1/batches": "batch",
    "GET /v1/batches/{batch}": "batch",
    "POST /v1/batches/{batch}/cancel": "batch",
    "GET /v1/batches/{batch}/results": "batch",
    "GET /admin/v1/batches": "admin",
    "GET /admin/v1/batches/{batch}": "admin",
    "POST /admin/v1/batches/{batch}/cancel": "admin",
    "POST /admin/v1/upstreams": "admin",
    "GET /admin/v1/upstreams": "admin",
    "GET /admin/v1/upstreams/{upstream}": "admin",
    "DELETE /admin/v1/upstreams/{upstream}": "admin",
    "POST /admin/v1/upstreams/{upstream}/check": "admin",
    "POST /admin/v1/upstreams/{upstream}/costs": "admin",
    "GET /admin/v1/upstreams/{upstream}/costs": "admin",
    "POST /admin/v1/upstreams/{upstream}/costs/pull": "admin",
    "POST /admin/v1/prefixes": "admin",
    "GET /admin/v1/prefixes": "admin",
    "GET /admin/v1/prefixes/{prefix_id}": "admin",
    "DELETE /admin/v1/prefixes/{prefix_id}": "admin",
    "POST /admin/v1/invoices": "admin",
    "GET /admin/v1/invoices": "admin",
    "GET /admin/v1/invoices/{number}": "admin",
    "GET /admin/v1/issuer": "admin",
    "PATCH /admin/v1/issuer": "admin",
    "GET /admin/v1/tenants/{tenant_id}/billing": "admin",
    "PATCH /admin/v1/tenants/{tenant_id}/billing": "admin",
    "GET /admin/v1/tenants/{tenant_id}/invoice-preview": "admin",
    "GET /admin/v1/tenants/{tenant_id}/uninvoiced": "admin",
    "GET /v1/invoice-preview": "usage:read",
    "POST /admin/v1/invoices/{number}/payments": "admin",
    "POST /admin/v1/invoices/{number}/void": "admin",
    "GET /v1/invoices": "usage:read",
    "GET /v1/invoices/{number}": "usage:read",
    "GET /v1/credits": "usage:read",
    "GET /admin/v1/exports/focus": "admin",
    "POST /admin/v1/verify-books": "admin",
    "GET /admin/v1/books": "admin",
    "POST /admin/v1/credits": "admin",
    "GET /admin/v1/credits": "admin",
    "POST /admin/v1/price-sheets": "admin",
    "POST /admin/v1/price-sheets/preview": "admin",
    "GET /admin/v1/price-sheets": "admin",
    "GET /admin/v1/price-sheets/{sheet}/{version}": "admin",
    "GET /admin/v1/price-sheets/{sheet}/{version}/month": "admin",
    "PUT /admin/v1/tenants/{tenant_id}/price-sheet": "admin",
    "GET /admin/v1/tenants/{tenant_id}/price-sheet": "admin",
    "POST /admin/v1/adapters": "admin",
    "GET /admin/v1/adapters": "admin",
    "GET /admin/v1/adapters/{adapter_id}": "admin",
    "DELETE /admin/v1/adapters/{adapter_id}": "admin",
    "POST /admin/v1/webhooks": "admin",
    "GET /admin/v1/webhooks": "admin",
    "GET /admin/v1/webhooks/{webhook_id}": "admin",
    "DELETE /admin/v1/webhooks/{webhook_id}": "admin",
    "POST /admin/v1/webhooks/{webhook_id}/test": "admin",
    "GET /admin/v1/webhooks/{webhook_id}/deliveries": "admin",
    "POST /v1/webhooks": "keys",
    "GET /v1/webhooks": "keys",
    "GET /v1/webhooks/{webhook_id}": "keys",
    "DELETE /v1/webhooks/{webhook_id}": "keys",
    "POST /v1/webhooks/{webhook_id}/test": "keys",
    "GET /v1/webhooks/{webhook_id}/deliveries": "keys",
    "GET /admin/v1/tenants": "admin",
    "GET /admin/v1/tenants/{tenant_id}/limits": "admin",
    "POST /admin/v1/tenants/{tenant_id}/limits/preview": "admin",
    "GET /admin/v1/cache": "admin",
    "GET /admin/v1/fairness": "admin",
    "GET /admin/v1/workers": "admin",
    "GET /admin/v1/workers/{worker_id}": "admin",
    "POST /admin/v1/workers/{worker_id}/drain": "admin",
    "POST /admin/v1/workers/{worker_id}/resume": "admin",
    "GET /admin/v1/tenants/{tenant_id}": "admin",
    "PATCH /admin/v1/tenants/{tenant_id}": "admin",
    "POST /admin/v1/tenants/{tenant_id}/purge-cache": "admin",
    "POST /admin/v1/budgets": "admin",
    "GET /admin/v1/budgets": "admin",
    "GET /admin/v1/budgets/{budget_id}": "admin",
    "PATCH /admin/v1/budgets/{budget_id}": "admin",
    "DELETE /admin/v1/budgets/{budget_id}": "admin",
    "POST /admin/v1/budgets/{budget_id}/adjustments": "admin",
    "GET /admin/v1/quotas": "admin",
    "POST /admin/v1/quotas": "admin",
    "POST /v1/organization/projects": "admin",
    "GET /v1/organization/projects": "admin",
    "GET /v1/organization/projects/{project_id}": "admin",
    "POST /v1/organization/projects/{project_id}": "admin",
    "POST /v1/organization/projects/{project_id}/archive": "admin",
    "POST /v1/organization/projects/{project_id}/service_accounts": "admin",
    "GET /v1/organization/projects/{project_id}/service_accounts": "admin",
    "GET /v1/organization/projects/{project_id}/service_accounts/{account_id}": "admin",
    "POST /v1/organization/projects/{project_id}/service_accounts/{account_id}": "admin",
    "DELETE /v1/organization/projects/{project_id}/service_accounts/{account_id}": "admin",
    "POST /v1/organization/projects/{project_id}/service_accounts/{account_id}/api_keys": "admin",
    "GET /v1/organization/projects/{project_id}/api_keys": "admin",
    "GET /v1/organization/projects/{project_id}/api_keys/{key_id}": "admin",
    "POST /v1/organization/projects/{project_id}/api_keys/{key_id}": "admin",
    "DELETE /v1/organization/projects/{project_id}/api_keys/{key_id}": "admin",
    "GET /v1/organization/projects/{project_id}/rate_limits": "admin",
    "POST /v1/organization/projects/{project_id}/rate_limits/{rate_limit_id}": "admin",
    "GET /v1/organization/projects/{project_id}/model_permissions": "admin",
    "POST /v1/organization/projects/{project_id}/model_permissions": "admin",
    "DELETE /v1/organization/projects/{project_id}/model_permissions": "admin",
    "GET /v1/organization/audit_logs": "admin",
    "POST /v1/organization/admin_api_keys": "admin",
    "GET /v1/organization/admin_api_keys": "admin",
    "GET /v1/organization/admin_api_keys/{key_id}": "admin",
    "DELETE /v1/organization/admin_api_keys/{key_id}": "admin",
    "GET /v1/organization/projects/{project_id}/spend_limit": "admin",
    "POST /v1/organization/projects/{project_id}/spend_limit": "admin",
    "DELETE /v1/organization/projects/{project_id}/spend_limit": "admin",
    "GET /v1/organization/projects/{project_id}/spend_alerts": "admin",
    "POST /v1/organization/projects/{project_id}/spend_alerts": "admin",
    "GET /v1/organization/projects/{project_id}/spend_alerts/{alert_id}": "admin",
    "POST /v1/organization/projects/{project_id}/spend_alerts/{alert_id}": "admin",
    "DELETE /v1/organization/projects/{project_id}/spend_alerts/{alert_id}": "admin",
    "GET /v1/organization/spend_limit": "admin",
    "POST /v1/organization/spend_limit": "admin",
    "DELETE /v1/organization/spend_limit": "admin",
    "GET /v1/organization/spend_alerts": "admin",
    "POST /v1/organization/spend_alerts": "admin",
    "GET /v1/organization/spend_alerts/{alert_id}": "admin",
    "POST /v1/organization/spend_alerts/{alert_id}": "admin",
    "DELETE /v1/organization/spend_alerts/{alert_id}": "admin",
    "DELETE /admin/v1/tenants/{tenant_id}": "admin",
    "GET /admin/v1/keys": "admin",
    "POST /admin/v1/keys": "admin",
    "GET /admin/v1/keys/{key_id}": "admin",
    "GET /admin/v1/keys/{key_id}/limits": "admin",
    "PATCH /admin/v1/keys/{key_id}": "admin",
    "DELETE /admin/v1/keys/{key_id}": "admin",
    "GET /v1/keys": "keys",
    "POST /v1/keys": "keys",
    "GET /v1/keys/{key_id}": "keys",
    "GET /v1/keys/{key_id}/limits": "keys",
    "PATCH /v1/keys/{key_id}": "keys",
    "DELETE /v1/keys/{key_id}": "keys",
    "POST /v1/keys/{key_id}/rotate": "keys",
    "POST /admin/v1/keys/{key_id}/rotate": "admin",
    "POST /admin/v1/leaked-keys": "admin",
    "GET /v1/organization/usage/completions": "usage:read",
    "GET /v1/organization/usage/embeddings": "usage:read",
    "GET /v1/organization/costs": "usage:read",
    "GET /admin/v1/usage/summary": "admin",
    "GET /v1/usage/summary": "usage:read",
    "GET /admin/v1/usage/labels": "admin",
    "GET /v1/usage/labels": "usage:read",
    "GET /admin/v1/anomalies": "admin",
    "GET /v1/anomalies": "usage:read",
    "GET /admin/v1/usage/changes": "admin",
    "GET /v1/usage/changes": "usage:read",
    "GET /admin/v1/requests": "admin",
    "GET /admin/v1/requests/volume": "admin",
    "GET /admin/v1/requests/{request_id}": "admin",
    "GET /admin/v1/requests/{request_id}/otlp": "admin",
    "GET /v1/requests": "usage:read",
    "GET /admin/v1/sessions": "admin",
    "GET /admin/v1/settings": "admin",
    "GET /v1/sessions": "usage:read",
    "GET /v1/requests/volume": "usage:read",
    "GET /v1/requests/{request_id}": "usage:read",
    "GET /v1/requests/{request_id}/otlp": "usage:read",
}


def principal(kind: str, *scopes: str) -> Principal:
    return Principal(kind=kind, tenant_id="t", key_id="k", scopes=frozenset(scopes))


def test_every_route_is_listed_with_its_scope() -> None:
    """A new room adds its routes here, with the scope it means."""
    served = {f"{route.method} {route.path}": route.scope for route in routes()}
    api = {name: scope for name, scope in served.items() if scope != "console"}
    missing = {name: scope for name, scope in api.items() if name not in LISTED}
    assert missing == {}
    assert {name: scope for name, scope in api.items() if LISTED[name] != scope} == {}
    assert len(served) == len(routes()), "two routes have one name"


@pytest.mark.parametrize("route", routes(), ids=lambda route: f"{route.method} {route.path}")
def test_each_identity_reaches_what_its_scopes_say_and_no_more(route: Route) -> None:
    operator = principal("operator", "admin")
    assert allows(route, operator) == (route.scope in {"admin", "usage:read"})
    finance = principal("operator", "admin:read")
    assert allows(route, finance) == (allows(route, operator) and route.method == "GET")
    assert not allows(route, principal("operator")) or route.scope == "none"
    for kind in ("tenant", "batch"):
        for scope in TENANT_SCOPES:
            expected = route.scope in {"any", scope} or route.or_scope == scope
            assert allows(route, principal(kind, scope)) == expected, (kind, scope)
        assert allows(route, principal(kind)) == (route.scope == "any")
        # A tenant key that claims the operator's scopes is still a tenant's.
        for scope in ("admin", "admin:read"):
            assert not allows(Route("GET", "/x", route.handler, "admin"), principal(kind, scope))


def test_what_another_scope_opens_too_is_reading_without_content() -> None:
    others = {f"{route.method} {route.path}": route.or_scope for route in routes() if route.or_scope}
    assert others == {"GET /v1/batches": "usage:read", "GET /v1/batches/{batch}": "usage:read"}


def test_s6_what_needs_no_key_is_probes_and_the_description_only() -> None:
    open_routes = {route.path for route in routes() if route.scope == "none"}
    assert open_routes <= {"/livez", "/readyz", "/health", "/openapi.json"}


def test_pages_for_people_are_below_console_and_nothing_else_is() -> None:
    for route in routes():
        assert (route.scope == "console") == route.path.startswith("/console"), route.path


def test_no_route_takes_more_than_a_json_body_unless_it_reads_by_itself() -> None:
    for route in routes():
        assert route.max_body_bytes <= 16 * 1024 * 1024 or not route.json_body
