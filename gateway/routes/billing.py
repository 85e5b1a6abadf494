"""`/admin/v1/issuer`, `/admin/v1/tenants/{tenant_id}/billing` and what becomes of an invoice: a preview before the
close, payments, and a void invoice that is issued again.
"""

from __future__ import annotations

from aiohttp import web

from accounting.billing import invoice_lines, invoices, payments, voids
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.terms import profiles
from accounting.values import clock
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import only_of, route
from gateway.routes.invoices import INVOICES, answer_as, wanted_type
from gateway.schema import billing as shapes
from gateway.schema import invoices as invoice_shapes
from gateway.schema import query
from gateway.schema.organization import listing, reply

ISSUER = "/admin/v1/issuer"
CUSTOMER = "/admin/v1/tenants/{tenant_id}/billing"
PREVIEW = "/admin/v1/tenants/{tenant_id}/invoice-preview"
UNINVOICED = "/admin/v1/tenants/{tenant_id}/uninvoiced"
OWN_PREVIEW = "/v1/invoice-preview"


async def get_issuer(request: web.Request) -> web.Response:
    """Shows who issues the invoices."""
    async with reading(request) as conn:
        return reply(shapes.issuer(await profiles.issuer(conn)))


async def change_issuer(request: web.Request) -> web.Response:
    """Changes who issues the invoices."""
    wanted = shapes.changes(await admin.json_object(request), shapes.IssuerChanges)
    async with writing(request, changes_identities=False) as conn:
        made = await profiles.change_issuer(conn, wanted, **admin.who(request))
    return reply(shapes.issuer(made))


async def get_customer(request: web.Request) -> web.Response:
    """Shows who is billed for a tenant."""
    tenant_id = admin.part(request, "tenant_id")
    async with reading(request) as conn:
        found = await profiles.customer(conn, tenant_id)
        return reply(shapes.customer(tenant_id, found, await profiles.issuer(conn)))


async def change_customer(request: web.Request) -> web.Response:
    """Changes who is billed for a tenant."""
    tenant_id = admin.part(request, "tenant_id")
    wanted = shapes.changes(await admin.json_object(request), shapes.CustomerChanges)
    async with writing(request, changes_identities=False) as conn:
        made = await profiles.change_customer(conn, tenant_id, wanted, **admin.who(request))
        return reply(shapes.customer(tenant_id, made, await profiles.issuer(conn)))


async def preview(request: web.Request) -> web.Response:
    """Shows the invoice that a close of the month would make of what is posted so far, in any type of an invoice."""
    query.refuse_unknown(request.query, {"format", "period"})
    kind = wanted_type(request)
    tenant_id = only_of(request) or request.match_info.get("tenant_id", request[PRINCIPAL].tenant_id)
    async with reading(request) as conn:
        period = query.text(request.query, "period") or ""
        found = await invoices.preview(conn, tenant_id, period, now_ms=clock.now_ms())
        picture = await profiles.logo(conn, found.terms.issuer.logo)
    return await answer_as(kind, found, picture)


async def uninvoiced(request: web.Request) -> web.Response:
    """Sums up the charges of a tenant that are on no invoice yet, which later closes bill."""
    query.refuse_unknown(request.query, ())
    tenant_id, now_ms = admin.part(request, "tenant_id"), clock.now_ms()
    async with reading(request) as conn:
        tenant = await tenants.get(conn, tenant_id)
        currency = await prices.currency_of_tenant(conn, tenant.id, now_ms)
        return reply(shapes.uninvoiced(tenant.id, currency, await invoice_lines.left(conn, tenant.id, now_ms // 1000)))


async def pay(request: web.Request) -> web.Response:
    """Records a payment of an invoice."""
    wanted = await admin.fields(request, shapes.NewPayment)
    async with writing(request, changes_identities=False) as conn:
        made = await payments.pay(
            conn,
            admin.part(request, "number"),
            wanted.amount_micro_units,
            reference=wanted.reference,
            paid_at=wanted.paid_at,
            now_ms=clock.now_ms(),
            actor=admin.actor(request),
        )
    return reply(invoice_shapes.invoice(made))


async def void(request: web.Request) -> web.Response:
    """Takes an invoice back and issue it again with the profiles of today: the credit note and the new invoice."""
    wanted = await admin.fields(request, shapes.NewVoid)
    async with writing(request, changes_identities=False) as conn:
        made = await voids.void(
            conn, admin.part(request, "number"), reason=wanted.reason, now_ms=clock.now_ms(), actor=admin.actor(request)
        )
    return reply(listing([invoice_shapes.invoice(one) for one in made], has_more=False))


ROUTES = [
    route("GET", ISSUER, get_issuer),
    route("PATCH", ISSUER, change_issuer, shapes.IssuerChanges),
    route("GET", CUSTOMER, get_customer),
    route("PATCH", CUSTOMER, change_customer, shapes.CustomerChanges),
    route("GET", PREVIEW, preview),
    route("GET", UNINVOICED, uninvoiced),
    Route("GET", OWN_PREVIEW, preview, "usage:read"),
    route("POST", INVOICES + "/{number}/payments", pay, shapes.NewPayment),
    route("POST", INVOICES + "/{number}/void", void, shapes.NewVoid),
]
