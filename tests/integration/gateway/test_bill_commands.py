"""Profiles, previews, payments and void invoices over HTTP and as an operator types them; what is hostile is refused or
inert.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json

import bills_world
import pytest
import pytest_asyncio
from billing_world import PERIOD
from click.testing import CliRunner
from en16931 import broken_rules
from facturx import get_facturx_xml_from_pdf
from gateways import running_gateway
from PIL import Image
from pypdf import PdfReader
from redis_db import emptied
from sqlalchemy import update

from accounting.tables.models import Tenant
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main

ISSUER = "/admin/v1/issuer"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory, redis_socket):
    async with running_gateway(tmp_path_factory.mktemp("home"), emptied(redis_socket, 3)) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def call(gateway, method, path, body=None, key=None):
    async with (
        gateway.session(key or gateway.keys.admin_key) as session,
        session.request(method, path, json=body) as answer,
    ):
        return answer.status, await answer.json()


async def file_of(gateway, path, key=None):
    async with gateway.session(key or gateway.keys.admin_key) as session, session.get(path) as answer:
        return answer, await answer.read()


async def headgate(gateway, *arguments):
    environment = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
    command = [*arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


async def test_an_operator_bills_a_customer_from_profile_to_payment(gateway, tmp_path):
    database = gateway.app[DATABASE]
    tenant = await bills_world.tenant(database, "الشركة", "EUR")
    picture = tmp_path / "logo.png"
    Image.new("RGB", (40, 20), (1, 2, 3)).save(picture)
    status, said = await headgate(
        gateway,
        "issuer",
        "set",
        "--name",
        "Beispiel GmbH",
        "--country",
        "de",
        "--vat-number",
        "DE 136695976",
        "--tax",
        "standard",
        "--tax-rate",
        "19",
        "--iban",
        "DE89 3704 0044 0532 0130 00",
        "--logo",
        str(picture),
    )
    assert (status, "DE136695976" in said, "19 %" in said) == (0, True, True), said
    status, said = await headgate(gateway, "billing", "set", tenant, "--country", "DE", "--purchase-order", "PO 4711")
    assert (status, "PO 4711" in said) == (0, True)
    status, said = await headgate(gateway, "billing", "show", tenant)
    shown = [" ".join(line.replace("\u2502", " ").split()) for line in said.splitlines()]
    assert (status, "tax_rule standard, 19 % (that of the issuer)" in shown, "0 %" in said) == (0, True, False), said
    export = ("billing", "set", tenant, "--tax", "export")
    assert "export, 0 % (its own)" in (await headgate(gateway, *export))[1]
    assert "19 % (that of the issuer)" in (await headgate(gateway, *export[:3], "--tax", "none"))[1]
    status, seen = await headgate(gateway, "invoice", "preview", tenant, "--period", PERIOD)
    assert (status, "EUR" in seen, "draft" in seen) == (0, True, True), seen
    out = tmp_path / "draft.pdf"
    assert (await headgate(gateway, "invoice", "preview", tenant, "--period", PERIOD, "--out", str(out)))[0] == 0
    assert "It is no invoice" in PdfReader(out).pages[-1].extract_text()
    _, closed = await headgate(gateway, "invoice", "close", "--period", PERIOD, "--tenant", tenant, "--json")
    made = json.loads(closed)
    number, due = made["number"], made["due_micro_units"]
    assert (made["state"], made["tax_micro_units"] > 0, due % 10_000) == ("open", True, 0)
    pdf = tmp_path / "i.pdf"
    await headgate(gateway, "invoice", "export", number, "--out", str(pdf))
    name, xml = get_facturx_xml_from_pdf(pdf.read_bytes())
    assert (name, broken_rules(xml)) == ("factur-x.xml", [])
    metadata = PdfReader(pdf).xmp_metadata
    assert metadata.pdfaid_part == "3"
    _, alone = await file_of(gateway, f"/admin/v1/invoices/{number}?format=xml")
    assert alone == xml
    assert b"PO 4711" in xml
    _, listed = await headgate(gateway, "invoice", "list", "--tenant", tenant)
    assert ("open" in listed, f"{due / 10**6:.2f} EUR" in listed) == (True, True)
    status, said = await headgate(gateway, "invoice", "void", number, "--reason", "wrong address")
    assert (status, "CN-" in said, "INV-" in said) == (0, True, True), said
    again = (await call(gateway, "GET", f"/admin/v1/invoices/{number}"))[1]["replaced_by"]
    status, said = await headgate(gateway, "invoice", "pay", again, "--reference", "statement 17")
    assert (status, "paid" in said) == (0, True), said
    assert (await headgate(gateway, "invoice", "pay", again))[0] == 1
    status, said = await headgate(gateway, "verify-books")
    assert (status, "rounding" in said) == (0, True), said


async def test_a_tenant_sees_its_own_preview_and_never_another_ones(gateway):
    tenant, key = await gateway.new_tenant("small")
    status, refused = await call(gateway, "GET", "/v1/invoice-preview?period=2025-09", key=key)
    assert (status, refused["error"]["message"]) == (409, "There is nothing to invoice for 2025-09.")
    assert (await call(gateway, "GET", f"/admin/v1/tenants/{tenant}/invoice-preview?period=2025-09", key=key))[0] == 403
    assert (await call(gateway, "GET", "/v1/invoice-preview?period=x", key=key))[0] == 400


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"name": "a\u202eb"}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"street": "a\nb"}, "street"),
        ({"name": "x" * 10_000}, "name"),
        ({"name": "   "}, "name"),
        ({"country": "XX"}, "country"),
        ({"country": "Germany"}, "country"),
        ({"vat_number": "DE123456789"}, "vat_number"),
        ({"vat_number": "ZZ1234"}, "country"),
        ({"vat_number": "DE136695976\u2066"}, "vat_number"),
        ({"iban": "DE89370400440532013001"}, "iban"),
        ({"bic": "NOPE"}, "bic"),
        ({"email": "nobody"}, "email"),
        ({"tax": "standard", "tax_rate": -1}, "tax_rate"),
        ({"tax": "standard", "tax_rate": 1_000_001}, "tax_rate"),
        ({"tax": "standard", "tax_rate": 0}, "tax_rate"),
        ({"tax": "zero", "tax_rate": 5}, "tax_rate"),
        ({"tax": "exempt"}, "tax_reason"),
        ({"tax": "sometimes"}, "tax"),
        ({"tax": "reverse_charge"}, "tax"),
        ({"payment_days": -1}, "payment_days"),
        ({"invoice_prefix": "../../etc/"}, "prefix"),
        ({"invoice_prefix": "=CMD-"}, "prefix"),
        ({"invoice_prefix": "A1"}, "prefix"),
        ({"invoice_prefix": "CN-"}, "credit_note_prefix"),
        ({"logo": "no base64!"}, "logo"),
        ({"logo": "ß£ä!"}, "logo"),
        ({"logo": base64.b64encode(b"<svg/>").decode()}, "logo"),
        ({"company_number": "<script>"}, "company_number"),
    ],
)
async def test_what_cannot_stand_on_a_document_is_refused_and_named(gateway, change, param):
    before = (await call(gateway, "GET", ISSUER))[1]
    clean = {"tax": None, "tax_rate": None, "tax_reason": None}
    status, body = await call(gateway, "PATCH", ISSUER, clean | change)
    assert (status, body["error"]["param"]) == (400, param), body
    assert (await call(gateway, "GET", ISSUER))[1] == before


async def test_a_picture_of_too_many_pixels_is_refused(gateway):
    drawn = io.BytesIO()
    Image.new("1", (4_000, 4_000)).save(drawn, "PNG")
    status, body = await call(gateway, "PATCH", ISSUER, {"logo": base64.b64encode(drawn.getvalue()).decode()})
    assert (status, "pixels" in body["error"]["message"]) == (400, True)


@pytest.mark.parametrize("percent", ["-1", "101", "nan", "1e400", "19,5", "0.00001"])
async def test_a_rate_that_is_no_percentage_is_one_sentence(gateway, percent):
    status, said = await headgate(gateway, "issuer", "set", "--tax-rate", percent)
    assert (status, "percentage" in said, "Traceback" in said) == (2, True, False), said


@pytest.mark.parametrize("currency", ["XXZ", "XAU"])
async def test_a_currency_that_nobody_can_pay_in_is_refused(gateway, currency):
    sheet = {
        "sheet": "odd",
        "currency": currency,
        "rates": [{"model": "m", "output": 1, "uncached": 1, "cache_read": 1}],
    }
    sheet["rates"][0]["cache_write"] = 1
    status, body = await call(gateway, "POST", "/admin/v1/price-sheets", sheet)
    assert (status, body["error"]["param"]) == (400, "currency")


async def test_a_name_with_hidden_characters_is_shown_and_not_obeyed(gateway):
    """A tenant's own name stands on its documents if the profile has no name. Books of older versions have any name."""
    tenant = await bills_world.tenant(gateway.app[DATABASE], "=1+1", "EUR", country="DE")
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(update(Tenant).where(Tenant.id == tenant).values(name="=1+1\u202egnp\x1b[31m"))
    _, made = await call(gateway, "POST", "/admin/v1/invoices", {"period": PERIOD, "project_id": tenant})
    path = f"/admin/v1/invoices/{made['number']}"
    for kind, shown in (("html", b"&lt;U+202E&gt;"), ("xml", b"&lt;U+001B&gt;")):
        _, content = await file_of(gateway, f"{path}?format={kind}")
        assert shown in content, content
        assert "\u202e".encode() not in content
    _, pdf = await file_of(gateway, f"{path}?format=pdf")
    assert "<U+202E>" in PdfReader(io.BytesIO(pdf)).pages[0].extract_text()
    _, table = await file_of(gateway, f"{path}?format=csv")
    assert b"\"'=1+1" in table


async def test_a_number_from_elsewhere_names_no_folder(gateway, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in ("../../etc/passwd", "..%2f..%2fx", "/etc/passwd"):
        status, said = await headgate(gateway, "invoice", "export", number)
        assert (status, "Not found" in said) == (1, True), said
    assert list(tmp_path.rglob("*.pdf")) == []


async def test_every_change_of_a_profile_is_in_the_audit_log(gateway):
    """Its log outlives everything, so an address, a mailbox or an account is named there and not repeated."""
    tenant, _ = await gateway.new_tenant("acme")
    changes = {"city": "Wien", "email": "bills@example.com", "payment_days": 14, "tax": "zero", "tax_rate": 0}
    status, said = await call(gateway, "PATCH", ISSUER, changes | {"iban": "DE89370400440532013000"})
    assert status == 200, said
    await call(gateway, "PATCH", f"/admin/v1/tenants/{tenant}/billing", changes)
    query = "SELECT event, detail FROM audit_log ORDER BY id DESC LIMIT 2"
    customer, issuer = [(row.event, json.loads(row.detail)) for row in await gateway.sql(query)]
    kept = {"payment_days": 14, "tax": "zero", "tax_rate": 0}
    fields = ["city", "email", "payment_days", "tax", "tax_rate"]
    assert customer == ("headgate.billing_profile.updated", {"fields": fields, **kept})
    assert issuer == ("headgate.issuer.updated", {"fields": sorted([*fields, "iban"]), **kept})
