"""The books in the console: the verdict with each equation's meaning, what was written off, and the journals."""

from __future__ import annotations

import secrets
import time

import pytest
from console_pages import signed_in
from console_world import spend
from money import EQUATIONS, posting, record

from accounting.access import api_keys
from accounting.requests import request_postings
from accounting.values.types import OPERATOR_TENANT, Usage
from gateway.base.app_keys import DATABASE, REDIS
from gateway.books.bookkeeping import BOOKKEEPING, QUIET_MS
from gateway.console.navigation import screens_of
from gateway.limiter.redis_keys import VERDICT_KEY

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def finance_key(gateway) -> str:
    async with gateway.app[DATABASE].write() as conn:
        made = await api_keys.create(
            conn, b"p" * 32, kind="admin", tenant_id=OPERATOR_TENANT, now=int(time.time()), scopes=("admin:read",)
        )
    return made.value


async def test_the_operator_verifies_and_finance_reads_the_verdict(shared_gateway):
    await shared_gateway.app[REDIS].delete(VERDICT_KEY)
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get("/books")
        assert "The books were not verified" in page.words
        assert 'href="/console/books"' in page.text
        page = await operator.submit("/books/verify")
        assert (page.status, page.path) == (200, "/console/books")
        assert "The books are right." in page.words
        for equation in EQUATIONS:
            assert equation.meaning in page.words
    async with signed_in(shared_gateway, await finance_key(shared_gateway)) as finance:
        page = await finance.get("/books")
        assert "The books are right." in page.words
        assert "Verify again" not in page.words
        assert "may not do this" in (await finance.submit("/books/verify", form_token=page.form_token)).words
        csv = await finance.get("/books?table=equations&format=csv")
        assert len(csv.text.splitlines()) == 1 + len(EQUATIONS)


async def test_finance_sees_every_screen_and_has_no_form_but_to_sign_out(shared_gateway):
    async with signed_in(shared_gateway, await finance_key(shared_gateway)) as finance:
        for screen in screens_of("finance"):
            page = await finance.get(screen.path)
            assert (page.status, page.text.count('method="post"')) == (200, 1), screen.path
            assert "form below" not in page.words, screen.path


async def test_finance_reads_the_profiles_of_bills_and_opens_no_form(shared_gateway):
    """It had no link to the profiles, and forms for keys and prices that it could not send."""
    tenant, _ = await shared_gateway.new_tenant("billed")
    async with signed_in(shared_gateway, await finance_key(shared_gateway)) as finance:
        for form in ("/keys/new", "/prices/edit"):
            assert (await finance.get(form)).status == 403
        assert 'href="/console/issuer"' in (await finance.get("/invoices")).text
        billing = f"/tenants/{tenant}/billing"
        assert f'href="/console{billing}"' in (await finance.get(f"/tenants/{tenant}")).text
        for path, title in (("/issuer", "Who bills"), (billing, "Who is billed")):
            page = await finance.get(path)
            assert (page.status, page.text.count('method="post"')) == (200, 1), path
            assert title in page.words
            assert " Street – Street, second line – " in page.words
        prefixes = await finance.get("/cache/prefixes")
        assert "No prefix is published." in prefixes.words
        assert "form below" not in prefixes.words


async def test_what_is_wrong_is_named(shared_gateway):
    tenant, _ = await shared_gateway.new_tenant("unwitnessed")
    await spend(shared_gateway, tenant)  # the engine has not counted it, and its key does not exist
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        await operator.get("/books")
        page = await operator.submit("/books/verify")
        assert "The books are wrong." in page.words
        rows = await shared_gateway.sql("SELECT request_id FROM ledger_entry WHERE tenant_id = :t", t=tenant)
        assert rows[0][0] in page.words


async def test_a_tenant_sees_no_books(shared_gateway):
    async with signed_in(shared_gateway) as tenant:
        page = await tenant.get("/books")
        assert "may not do this" in page.words
        assert 'href="/console/books"' not in page.text
        refused = await tenant.submit("/books/verify")
        assert "may not do this" in refused.words


async def test_journals_show_how_far_they_are_posted(shared_gateway):
    async with shared_gateway.session() as session:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        async with session.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
    await shared_gateway.settled()
    async with shared_gateway.session(shared_gateway.keys.admin_key) as admin, admin.get("/admin/v1/books") as answer:
        found = await answer.json()
    assert found["this_gateway"]["num_unshipped"] == 0
    assert 0 in [journal["slot"] for journal in found["journals"]]


async def test_tenants_of_whom_much_was_written_off_are_named(shared_gateway):
    tenant, _ = await shared_gateway.new_tenant("unlucky")
    now_ms = int(time.time() * 1000)
    request_id = f"req_{now_ms:012x}{secrets.token_hex(10)}"
    mine = {"tenant_id": tenant, "write_off": "worker_crash", "opened_at_ms": now_ms, "kind": "void"}
    async with shared_gateway.app[DATABASE].write() as conn:
        await request_postings.post(conn, 7, 2, [posting(request_id, **mine)])
        made = record(request_id, Usage(0, 0, 0, 5_000), tenant_id=tenant, worker="lost")
        await request_postings.post_engine_records(conn, [made])
    keeper = shared_gateway.app[BOOKKEEPING]
    await keeper.once(now_ms + QUIET_MS + 1_000)
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        csv = (await operator.get("/books?table=tenants-written-off&format=csv")).text
        assert f'"unlucky",5000,1.0,"worker_crash","{tenant}"' in csv
        assert "unlucky" in (await operator.get("/books")).words
