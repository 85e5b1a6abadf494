"""Invoices: the list, one with its files, the close of a month, the FOCUS export, and what tenants see of it."""

from __future__ import annotations

import io
import re
from html import unescape

import aiohttp
import bills_world
import pytest
import pytest_asyncio
from billing_world import PERIOD, used
from console_pages import Page, signed_in
from PIL import Image

from accounting.access import api_keys
from accounting.billing import credits
from accounting.billing.credits import NewCredit
from gateway.base.app_keys import DATABASE

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROBE = "<script>alert(1)</script>\"'=cmd|' /C calc'!A0"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def closed(shared_gateway):
    """(tenant, its key, number of its invoice), closed in the console by the operator."""
    tenant = await used(shared_gateway, PROBE)
    async with shared_gateway.app[DATABASE].write() as conn:
        made = await api_keys.create(conn, b"p" * 32, tenant_id=tenant, now=1)
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        await operator.get("/invoices")
        page = await operator.submit("/invoices/close", period=PERIOD, project_id=tenant, is_sure="yes")
        assert page.status == 200, page.words
        number = page.path.rpartition("/")[2]
    return tenant, made.value, number


async def test_a_close_needs_the_checkbox_and_a_month_that_is_over(shared_gateway):
    before = await shared_gateway.sql("SELECT count(*) FROM invoice")
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        await operator.get("/invoices")
        unsure = await operator.submit("/invoices/close", period=PERIOD)
        assert unsure.status == 400
        assert f'value="{PERIOD}"' in unsure.text
        for period, sentence in (("2099-01", "closes 48 hours after its end"), (PROBE, "period")):
            page = await operator.submit("/invoices/close", period=period, is_sure="yes")
            assert page.status == 400
            assert sentence in page.words
            assert "<script>alert" not in page.text
    assert await shared_gateway.sql("SELECT count(*) FROM invoice") == before


async def test_an_invoice_shows_its_lines_and_comes_as_pdf_html_and_csv(shared_gateway, closed):
    tenant, key, number = closed
    for path, who in (("/admin/v1/invoices", shared_gateway.keys.admin_key), ("/v1/invoices", key)):
        async with shared_gateway.session(who) as session, session.get(f"{path}/{number}") as answer:
            invoice = await answer.json()
            assert invoice["project_id"] == tenant
    for who in (key, shared_gateway.keys.admin_key):
        async with signed_in(shared_gateway, who) as browser:
            page = await browser.get(f"/invoices/{number}")
            assert f"Invoice {number}" in page.words
            assert "<script>alert" not in page.text
            assert "cache_read" in page.words
            assert f"/console/invoices/{number}/pdf" in page.text
            assert "from=2025-09-01T00:00&amp;until=2025-10-01T00:00&amp;service_tier=default" in page.text
            pdf = await browser.get(f"/invoices/{number}/pdf")
            assert (pdf.headers["content-type"], pdf.text[:5]) == ("application/pdf", "%PDF-")
            html = await browser.get(f"/invoices/{number}/html")
            assert "default-src 'none'" in html.headers["content-security-policy"]
            assert "<script>alert" not in html.text
            assert number in (await browser.get(f"/invoices/{number}/csv")).text
            assert (await browser.get(f"/invoices/{number}/exe")).status == 400


async def test_a_tenant_sees_its_own_invoices_alone_and_closes_none(shared_gateway, closed):
    tenant, key, number = closed
    _, stranger = await shared_gateway.new_tenant("stranger")
    async with signed_in(shared_gateway, stranger) as browser:
        listed = await browser.get(f"/invoices?project_id={tenant}")
        assert number not in listed.text
        assert "There is no invoice yet. Preview a draft below." in listed.words
        assert "Close a month" not in listed.words
        for path in (f"/invoices/{number}", f"/invoices/{number}/pdf"):
            assert (await browser.get(path)).status == 404
        await browser.get("/invoices")
        refused = await browser.submit("/invoices/close", period=PERIOD, is_sure="yes")
        assert "may not do this" in refused.words
        assert "may not do this" in (await browser.get(f"/invoices/focus?period={PERIOD}")).words
    async with signed_in(shared_gateway, key) as browser:
        assert number in (await browser.get("/invoices")).words
        csv = (await browser.get("/invoices?format=csv")).text
        assert number in csv
    async with shared_gateway.session(stranger) as session:
        async with session.get(f"/v1/invoices/{number}") as answer:
            assert answer.status == 404
        async with session.get(f"/v1/invoices?project_id={tenant}") as answer:
            assert (await answer.json())["data"] == []


async def test_focus_is_a_file_of_the_month(shared_gateway, closed):
    tenant, _, number = closed
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get(f"/invoices/focus?period={PERIOD}")
        assert page.headers["content-disposition"] == f'attachment; filename="focus-{PERIOD}.csv"'
        head, *rows = page.text.splitlines()
        assert head.startswith('"BillingAccountId"')
        mine = [row for row in rows if tenant in row]
        assert len([row for row in mine if '"Usage"' in row]) == 8  # two days, four classes
        assert all(number in row for row in mine)
        assert "A period is a month" in (await operator.get("/invoices/focus?period=x")).words


async def test_credits_show_what_is_left_and_their_notes_stay_text(shared_gateway, closed):
    tenant, key, _ = closed
    body = {
        "type": "grant",
        "project_id": tenant,
        "amount_micro_units": 5_000_000,
        "note": "=cmd|' /C calc'!A0<script>alert(1)",
    }
    async with (
        shared_gateway.session(shared_gateway.keys.admin_key) as admin,
        admin.post("/admin/v1/credits", json=body, headers={"idempotency-key": "one"}) as answer,
    ):
        assert answer.status == 200
    _, stranger = await shared_gateway.new_tenant("without credit")
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get("/invoices")
        assert "5.000000 USD" in page.words
        assert "<script>alert" not in page.text
        assert "\"'=cmd" in (await browser.get("/invoices?table=credits&format=csv")).text
    async with signed_in(shared_gateway, stranger) as browser:
        assert "5.000000 USD" not in (await browser.get("/invoices")).words


async def test_each_list_of_the_page_has_pages_and_files_of_its_own(shared_gateway, monkeypatch):
    tenant, key = await shared_gateway.new_tenant("often credited")
    async with shared_gateway.app[DATABASE].write() as conn:
        for number in range(103):
            wanted = NewCredit(tenant_id=tenant, type="grant", amount=1_000_000 + number, currency="USD", note="x")
            await credits.create(conn, wanted, key=f"many {number}", now_ms=1_700_000_000_000 + number, actor="key_a")
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get("/invoices")
        [link] = re.findall(r'href="/console(/invoices\?[^"]*after_credit=[^"]*)"', unescape(page.text))
        assert (page.text.count("<td>grant</td>"), (await browser.get(link)).text.count("<td>grant</td>")) == (100, 3)
        file = await browser.get(f"{link}&format=csv")
        assert len(file.text.splitlines()) == 1 + 103
        monkeypatch.setattr("gateway.console.viewer.MAX_EXPORTED_ROWS", 102)
        statuses = [
            (await browser.get(f"/invoices?format=csv&table={name}")).status for name in ("credits", "invoices")
        ]
        assert statuses == [400, 200], "a file is refused for its own rows alone"


async def test_a_credit_is_given_once_however_often_its_form_is_sent(shared_gateway):
    tenant, key = await shared_gateway.new_tenant("lucky")
    form = {
        "type": "grant",
        "project_id": tenant,
        "amount": "12.50",
        "currency": "USD",
        "note": PROBE,
        "once": "a" * 32,
    }
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        await operator.get("/invoices")
        for wrong, sentence in (
            ({"amount": "12,50"}, "is not an amount like 25.00"),
            ({"project_id": "proj_no"}, "not"),
        ):
            refused = await operator.submit("/invoices/credits", **(form | wrong | {"once": "b" * 32}))
            assert (refused.status, sentence in refused.words) == (400, True), refused.words
            assert "<script>alert" not in refused.text
            await operator.get("/invoices")
        for _ in range(2):
            page = await operator.submit("/invoices/credits", **form)
            assert "The credit of 12.50 was given." in page.words
    async with signed_in(shared_gateway, key) as browser:
        page = await browser.get("/invoices")
        assert page.words.count("12.500000 USD") == 2, "the amount and what is left of it"
        assert "Give a credit" not in page.words
        refused = await browser.submit("/invoices/credits", **form)
        assert refused.status in {400, 403, 404}
    assert await shared_gateway.sql(f"SELECT count(*) FROM credit WHERE tenant_id = '{tenant}'") == [(1,)]


async def test_an_operator_bills_previews_voids_and_is_paid_in_the_console(shared_gateway) -> None:
    tenant = await bills_world.tenant(shared_gateway.app[DATABASE], "billed <b>", "EUR")
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        assert "Who bills" in (await operator.get("/issuer")).words
        wrong = await operator.submit("/issuer", name="Example Ltd", iban="DE00", tax="not_subject")
        assert (wrong.status, "check digits" in wrong.words) == (400, True)
        assert "DE00" in wrong.text
        await operator.submit(
            "/issuer", name="Example Ltd", country="DE", tax="standard", tax_rate="19", payment_days="14"
        )
        page = await operator.get(f"/tenants/{tenant}/billing")
        assert "They are taxed by the issuer's rule: " in page.words
        page = await operator.submit(f"/tenants/{tenant}/billing", city="São Paulo", country="BR")
        assert "São Paulo" in page.text
        draft = await operator.get(f"/invoices/draft?project_id={tenant}&period={PERIOD}")
        assert "It is no invoice" in draft.words
        await operator.get("/invoices")
        page = await operator.submit("/invoices/close", period=PERIOD, project_id=tenant, is_sure="yes")
        number = re.search(r"INV-\d{6}", page.words)[0]
        assert "open" in page.words
        refused = await operator.submit(f"/invoices/{number}/pay", amount="0.001")
        assert (refused.status, "can be paid in EUR" in refused.words) == (400, True)
        page = await operator.submit(f"/invoices/{number}/void", reason="wrong address")
        again = re.search(r"replaced by (INV-\d{6})", page.words)[1]
        await operator.get(f"/invoices/{again}")
        page = await operator.submit(f"/invoices/{again}/pay", reference="statement 3")
        assert "paid" in page.words
        assert (await operator.get(f"/invoices/{again}/xml")).status in (200, 409)


async def test_the_issuers_logo_is_uploaded_checked_and_removed(shared_gateway):
    picture = io.BytesIO()
    Image.new("RGB", (4, 3), "navy").save(picture, "PNG")
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get("/issuer")
        assert "Documents have no logo." in page.words

        async def upload(content: bytes, token: str) -> Page:
            form = aiohttp.FormData()
            form.add_field("form_token", token)
            form.add_field("logo", content, filename='l"ogo.png', content_type="image/png")
            async with operator.session.post("/console/issuer/logo", data=form) as answer:
                return Page(answer.status, str(answer.url.relative()), await answer.text(), {})

        assert (await upload(picture.getvalue(), "0" * 64)).status == 403
        refused = await upload(b"<script>alert(1)</script>", page.form_token)
        assert (refused.status, "no PNG or JPEG picture" in refused.words) == (400, True)
        assert (await upload(b"x" * 200_000, page.form_token)).status == 413
        stored = await upload(picture.getvalue(), page.form_token)
        assert (stored.status, "Documents have a logo." in stored.words) == (200, True)
        content = (await shared_gateway.sql("SELECT content FROM logo"))[0][0]
        assert content == picture.getvalue()
        removed = await operator.submit("/issuer/logo", remove="yes")
        assert "Documents have no logo." in removed.words
        assert (await operator.submit("/issuer/logo")).status == 400
