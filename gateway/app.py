"""The table of contents of a gateway process: what it holds, what every request passes, what it answers.

One chat request (architecture.md section 3): `http/middleware` → `routes/chat` → `idempotency` → `text` →
`generation/engine_request` → `generation/quotes` → `generation/reply` → `generation/stream` → `metering/admission` →
`routing` → worker → `generation/generation` → `http/sse`; then it is settled, and then it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from gateway import resources
from gateway.base.addresses import UnlistedProxy
from gateway.base.app_keys import DETACHED, KEY_CONNECTIONS, LIFECYCLE, RUNNING, SETTINGS, UNLISTED_PROXY
from gateway.base.buckets import Buckets
from gateway.base.lifecycle import Detached, Lifecycle
from gateway.base.running import KeyConnections, Places, Running, Turns
from gateway.base.settings import GatewaySettings
from gateway.batches.waits import BATCH_WAITS, BatchWaits
from gateway.console import routes as console
from gateway.console.pages import EXPORTING
from gateway.http import cors, middleware
from gateway.http.route_table import ROUTES, Route
from gateway.http.sql import NEWS_OF_TENANTS, NewsOfTenants
from gateway.idempotency import waits
from gateway.idempotency.idempotency import KEYED
from gateway.intake.intake import INTAKE, Intake
from gateway.intake.throttle import THROTTLE, AdaptiveThrottle
from gateway.routes import (
    adapters,
    anomalies,
    audit_logs,
    batch_estimates,
    batch_results,
    batches,
    billing,
    books,
    budgets,
    cache,
    chat,
    completions,
    description,
    doctor,
    embeddings,
    fairness,
    files,
    health,
    invoices,
    keys,
    limits,
    message_batches,
    messages,
    models,
    operator_keys,
    organization,
    prefixes,
    price_sheets,
    project_keys,
    quotes,
    rate_limits,
    requests,
    response_socket,
    responses,
    scores,
    service_accounts,
    spending,
    tenants,
    tokenize,
    upstream_costs,
    upstreams,
    usage,
    usage_changes,
    usage_summary,
    webhooks,
    workers,
)
from gateway.routes.batch_estimates import ESTIMATING
from gateway.routes.batch_results import READ_TURNS
from gateway.telemetry.keys import OBSERVERS
from gateway.telemetry.observers import Observers


def routes() -> list[Route]:
    """Returns every route of the base URL. Other routes do not exist."""
    return [*api_routes(), *console.ROUTES]


def api_routes() -> list[Route]:
    """Returns the routes for programs."""
    return [
        *health.ROUTES,
        *description.ROUTES,
        *models.ROUTES,
        *chat.ROUTES,
        *completions.ROUTES,
        *responses.ROUTES,
        *response_socket.ROUTES,
        *messages.ROUTES,
        *message_batches.ROUTES,
        *embeddings.ROUTES,
        *scores.ROUTES,
        *tokenize.ROUTES,
        *quotes.ROUTES,
        *files.ROUTES,
        *batch_estimates.ROUTES,
        *batches.ROUTES,
        *batch_results.ROUTES,
        *organization.ROUTES,
        *operator_keys.ROUTES,
        *service_accounts.ROUTES,
        *project_keys.ROUTES,
        *rate_limits.ROUTES,
        *audit_logs.ROUTES,
        *spending.ROUTES,
        *keys.ROUTES,
        *usage.ROUTES,
        *usage_summary.ROUTES,
        *usage_changes.ROUTES,
        *requests.ROUTES,
        *anomalies.ROUTES,
        *prefixes.ROUTES,
        *adapters.ROUTES,
        *webhooks.ROUTES,
        *workers.ROUTES,
        *upstreams.ROUTES,
        *upstream_costs.ROUTES,
        *cache.ROUTES,
        *fairness.ROUTES,
        *price_sheets.ROUTES,
        *invoices.ROUTES,
        *billing.ROUTES,
        *books.ROUTES,
        *tenants.ROUTES,
        *budgets.ROUTES,
        *limits.ROUTES,
        *doctor.ROUTES,
    ]


def create_app(settings: GatewaySettings) -> web.Application:
    app = web.Application(
        middlewares=[middleware.observe, middleware.error_bodies, cors.preflight, middleware.guard],
        client_max_size=0,  # `body.read` keeps each route's own limit
    )
    app[SETTINGS] = settings
    app[LIFECYCLE] = Lifecycle()
    app[DETACHED] = Detached()
    app[OBSERVERS] = Observers()
    app[KEYED] = set()
    app[waits.REPEAT_WAITS] = Places(waits.MOST)
    app[BATCH_WAITS] = BatchWaits(app)
    app[READ_TURNS] = Turns()
    app[ESTIMATING] = set()
    app[EXPORTING] = set()
    app[RUNNING] = Running()
    app[THROTTLE] = AdaptiveThrottle()
    app[INTAKE] = Intake(settings.body_bytes_held, settings.body_bytes_per_minute)
    app[KEY_CONNECTIONS] = KeyConnections(settings.max_connections_per_key)
    app[keys.KEY_CHANGES] = Buckets(keys.KEY_CHANGES_BURST, keys.KEY_CHANGES_PER_S)
    app[NEWS_OF_TENANTS] = NewsOfTenants(app)
    app[UNLISTED_PROXY] = UnlistedProxy(settings.trusted_networks)
    app.cleanup_ctx.extend(resources.ALL)
    app.on_response_prepare.append(middleware.stamp_answer)
    add_routes(app, routes())
    return app


def add_routes(app: web.Application, table: Sequence[Route]) -> None:
    """Adds the routes. Routes without a key also answer HEAD, without a body: load balancers and monitors use it."""
    app[ROUTES] = {
        app.router.add_route(method, route.path, route.handler): route
        for route in table
        for method in ((route.method, "HEAD") if route.scope == "none" else (route.method,))
    }
