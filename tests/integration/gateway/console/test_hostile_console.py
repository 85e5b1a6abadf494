"""Every page and every export, walked from link to link: hostile text stays text, and another tenant's ids open nothing."""

from __future__ import annotations

import csv
import io
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from html import unescape
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from console_pages import Browser, Page, signed_in
from console_world import spend
from gateways import MODEL, RunningGateway
from yarl import URL

from accounting.access import api_keys
from accounting.billing import credits
from accounting.billing.credits import NewCredit
from accounting.requests import label_usage, request_log
from accounting.requests.request_log import LoggedRequest
from gateway.app import routes
from gateway.base.app_keys import DATABASE
from gateway.intake.text_work import TEXT_WORK

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
MARKUP = "\"'><img src=x onerror=alert(1)><script>alert(1)</script>{{7*7}}"
FORMULA = "=cmd|' /C calc'!A0"
HOSTILE = FORMULA + MARKUP
MAX_PAGES = 150
OPEN = ("/console/sign-in", "/console/assets/{version}/{name}")
ALL_MAY = "/console/sign-out"
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
GETS = [route.path for route in routes() if route.scope == "console" and route.method == "GET"]
POSTS = [route.path for route in routes() if route.scope == "console" and route.method == "POST"]


class Markup(HTMLParser):
    """Notes what no page of the console has: handlers, inline scripts and styles, addresses of other hosts."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.links: set[str] = set()
        self.feed(page.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in {"iframe", "object", "embed", "base", "style"} or (tag == "script" and "src" not in values):
            self.wrong.append(tag)
        self.wrong += [name for name in values if name.startswith("on") or name == "style"]
        for name in ("href", "src", "action", "formaction"):
            address = values.get(name)
            if address and not address.startswith(("/console", "#")):
                self.wrong.append(address)
            if name == "href" and address and address.startswith("/console"):
                self.links.add(address.partition("#")[0].removeprefix("/console"))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def planted(shared_gateway: RunningGateway) -> tuple[str, str]:
    """(tenant, its key): hostile text stands in everything that a tenant or an operator can name."""
    gateway = shared_gateway
    tenant, key = await gateway.new_tenant(HOSTILE)
    now_ms = int(time.time() * 1000)
    row: dict[str, Any] = {
        "request_id": f"req_{now_ms - 9_000:012x}7{1:019x}",
        "is_tail": False,
        "started_at_ms": now_ms - 9_000,
        "tenant_id": tenant,
        "key_id": "key_1",
        "endpoint": "POST /v1/chat/completions",
        "model": HOSTILE,
        "status": 200,
        "outcome": "ok",
        "end_user": HOSTILE,
        "session_id": HOSTILE,
        "metadata": {HOSTILE: HOSTILE},
        "prompt_tokens": 5,
        "charge": 7,
        "currency": "USD",
        "trace_id": "a" * 32,
        "timeline": "[[[0,0]],[],0]",
    }
    charge = await spend(gateway, tenant)
    assert charge
    async with gateway.app[DATABASE].write() as conn:
        await label_usage.note(conn, [LoggedRequest(**row)])
        await request_log.add(conn, [LoggedRequest(**row)])
        await api_keys.create(
            conn, b"p" * 32, tenant_id=tenant, now=1, name=HOSTILE, models=[HOSTILE], scopes=["keys", "usage:read"]
        )
        await credits.create(
            conn,
            NewCredit(tenant_id=tenant, type="grant", amount=5, currency="USD", note=HOSTILE),
            key="once",
            now_ms=now_ms,
            actor="key_admin",
        )
    async with gateway.session(gateway.keys.admin_key) as admin:
        for method, path, body in (
            ("PATCH", "/admin/v1/issuer", {"name": HOSTILE, "payment_note": HOSTILE}),
            ("PATCH", f"/admin/v1/tenants/{tenant}/billing", {"name": HOSTILE, "purchase_order": HOSTILE}),
            ("POST", "/admin/v1/prefixes", {"model": MODEL, "name": HOSTILE, "text": "a" * 64}),
            ("POST", "/admin/v1/webhooks", {"url": "https://example.com/?" + quote(HOSTILE), "project_id": tenant}),
            (
                "POST",
                f"/v1/organization/projects/{tenant}/spend_alerts",
                {
                    "threshold_amount": 100,
                    "currency": "USD",
                    "interval": "month",
                    "notification_channel": {
                        "type": "email",
                        "recipients": ["=1@example.com"],
                        "subject_prefix": HOSTILE,
                    },
                },
            ),
        ):
            async with admin.request(method, path, json=body) as answer:
                assert answer.status < 400 or answer.status == 400, (path, await answer.text())
    return tenant, key


async def walk(one: Browser, starts: list[str]) -> list[Page]:
    """Follows every link of every page, each once, and checks what it finds."""
    waiting, seen, found = deque(starts), set(starts), []
    while waiting and len(found) < MAX_PAGES:
        path = waiting.popleft()
        page = await one.get(path)
        assert page.status < 500, (path, page.status)
        if page.status >= 400:
            continue
        found.append(page)
        kind = page.headers["content-type"].partition(";")[0]
        if kind == "text/csv" and "/invoices/" not in path:
            for line in csv.reader(io.StringIO(page.text)):
                numbers = re.compile(r"-?[0-9.]+")
                bad = [cell for cell in line if cell.startswith(FORMULA_STARTS) and not numbers.fullmatch(cell)]
                assert not bad, (path, bad)
        if kind != "text/html" or "/invoices/" in path:
            continue
        markup = Markup(page)
        assert not markup.wrong, (path, markup.wrong)
        assert "<script>alert" not in page.text, path
        # Pages of time lead to finer ones without end, so one of each is enough.
        for link in sorted(markup.links):
            link = unescape(link)
            if link not in seen and "format=parquet" not in link and "/assets/" not in link and "width=" not in link:
                seen.add(link)
                waiting.append(link)
    return found


async def test_hostile_text_is_inert_on_every_page_and_in_every_export_of_the_operator(
    shared_gateway: RunningGateway, planted: tuple[str, str]
) -> None:
    tenant, _ = planted
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        starts = ["", f"/tenants/{tenant}", f"/tenants/{tenant}/billing", f"/keys?project_id={tenant}", "/issuer"]
        starts += ["/usage/labels", "/usage/labels?label=metadata." + quote(HOSTILE), f"/prices?tenant_id={tenant}"]
        starts += [
            f"/{name}?project_id={quote(HOSTILE)}&model={quote(HOSTILE)}" for name in ("requests", "usage", "sessions")
        ]
        found = await walk(operator, starts)
        texts = "".join(page.text for page in found if page.headers["content-type"].startswith("text/html"))
        assert texts.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 20
        assert len({page.path.partition("?")[0] for page in found}) > 25


async def test_hostile_text_is_inert_on_every_page_and_in_every_export_of_a_tenant(
    shared_gateway: RunningGateway, planted: tuple[str, str]
) -> None:
    async with signed_in(shared_gateway, planted[1]) as tenant:
        found = await walk(tenant, ["", "/usage/labels", "/usage/changes"])
        assert len({page.path.partition("?")[0] for page in found}) > 10


async def test_another_tenants_ids_open_nothing_on_any_screen(
    shared_gateway: RunningGateway, planted: tuple[str, str]
) -> None:
    """Each route and each filter is asked for with ids of a tenant that is not the one who asks."""
    owner, _ = planted
    [[request_id]] = await shared_gateway.sql("SELECT request_id FROM request_log WHERE tenant_id = :t", t=owner)
    [[key_id]] = await shared_gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t AND name != ''", t=owner)
    _, key = await shared_gateway.new_tenant("neighbour")
    ids = {"id": request_id, "number": "INV-000001", "budget_id": "budget_1", "alert_id": "alert_1", "kind": "pdf"}
    async with signed_in(shared_gateway, key) as stranger:
        await stranger.get("")
        token = stranger.last.form_token if stranger.last else ""
        for path in GETS + POSTS:
            method = "POST" if path in POSTS else "GET"
            for one in (owner, request_id, key_id):
                target = re.sub(
                    r"\{(\w+)\}", lambda m, one=one: ids[m[1]] if m[1] != "id" and m[1] in ids else one, path
                )
                if path in {"/console/sign-out", "/console/sign-in", "/console/assets/{version}/{name}"}:
                    continue
                query = {"project_id": owner, "api_key_id": key_id, "tenant_id": owner, "session": "none"}
                if method == "GET":
                    answer = stranger.session.get(target, params=query, allow_redirects=False)
                else:
                    answer = stranger.session.post(target, data=query | {"form_token": token}, allow_redirects=False)
                async with answer as page:
                    text = await page.text(errors="replace")
                    assert page.status < 500, (target, page.status)
                    # The ids stand in the address, so a page may repeat them in its form. Names and numbers do not.
                    for secret in ("alert(1)", f">{owner}<", f">{request_id}<", f">{key_id}<", "a" * 32):
                        assert secret not in text, (target, secret)
        assert await shared_gateway.sql("SELECT status FROM tenant WHERE id = :t", t=owner) == [("active",)]


@pytest.mark.parametrize(
    "part", ["%00", "%0a", "%ff", "%2f", "a%2fb", "..%2f..%2fkeys", "%2e%2e", "x" * 3_000, "%F0%9F%92%A9"]
)
async def test_parts_of_addresses_that_no_object_has_are_not_found(shared_gateway: RunningGateway, part: str) -> None:
    """On every page, as the operator and as a tenant: a page that says so, and never a fault or another object."""
    tenant_key = (await shared_gateway.new_tenant("odd addresses", [*api_keys.TENANT_SCOPES]))[1]
    for key in (shared_gateway.keys.admin_key, tenant_key):
        async with signed_in(shared_gateway, key) as one:
            token = (await one.get("")).form_token
            for path in sorted({path for path in GETS + POSTS if "{" in path} - {*OPEN}):
                target = URL(re.sub(r"\{[^}]*\}", part, path.replace("{kind}", "pdf")), encoded=True)
                method = "GET" if path in GETS else "POST"
                data = {"form_token": token} if method == "POST" else None
                async with one.session.request(method, target, data=data, allow_redirects=False) as answer:
                    text = await answer.text(errors="replace")
                    # The operator has no files of batches, and a tenant none of the operator's pages.
                    is_seen = key == shared_gateway.keys.admin_key and not path.startswith("/console/batches")
                    refused = {404} if method == "GET" and is_seen else {400, 403, 404}
                    assert answer.status in refused, (method, target, answer.status, text[-600:])
                    assert answer.content_type == "text/html", (method, target)


async def test_who_reads_only_sends_no_form_and_opens_no_page_of_the_operator(shared_gateway: RunningGateway) -> None:
    """Each route of the console with a viewer's session. What a menu does not lead to is refused as the API refuses it."""
    tenant, key = await shared_gateway.new_tenant("looks only", ["usage:read", "files:read"])
    allowed = ("", "/requests", "/sessions", "/batches", "/usage", "/invoices", "/anomalies", "/limits")
    sent = {"project_id": tenant, "name": "x", "scopes": "chat", "amount": "1", "is_sure": "yes", "action": "create"}
    async with signed_in(shared_gateway, key) as viewer:
        token = (await viewer.get("")).form_token
        before = await _counts(shared_gateway)
        for path in sorted({*GETS, *POSTS} - {*OPEN, ALL_MAY, "/console/{rest:(?s:.*)}"}):
            target = re.sub(r"\{\w+\}", tenant, path)
            screen = path.removeprefix("/console")
            if path in POSTS:
                data = sent | {"form_token": token}
                async with viewer.session.post(target, data=data, allow_redirects=False) as answer:
                    assert answer.status == 403, (path, answer.status)
            if path in GETS and (screen == "/invoices/focus" or not screen.startswith(allowed[1:])) and screen:
                async with viewer.session.get(target, allow_redirects=False) as answer:
                    assert answer.status == 403, (path, answer.status)
        assert await _counts(shared_gateway) == before
        for screen in allowed:
            page = await viewer.get(screen)
            assert page.status == 200, (screen, page.words)
        assert (await viewer.get("")).form_token == token
        assert (await viewer.submit("/sign-out")).path == "/console/sign-in"


@pytest.mark.parametrize(
    "scopes", [*([scope] for scope in sorted(api_keys.TENANT_SCOPES)), ["keys", "usage:read"]], ids=str
)
async def test_a_menu_leads_to_no_refusal(shared_gateway: RunningGateway, scopes: list[str]) -> None:
    """A key for chats alone had six entries that answered 403, and a read-only one could never open Batches."""
    _, key = await shared_gateway.new_tenant("one scope", scopes)
    async with signed_in(shared_gateway, key) as one:
        menu = re.search(r"<nav.*?</nav>", (await one.get("")).text, re.DOTALL)
        assert menu is not None
        links = re.findall(r'href="/console([^"]*)"', menu[0])
        for link in links:
            page = await one.get(link)
            assert (page.status, "has the scope keys" in page.words) == (200, False), (link, page.words)
    expected = {"usage:read": 8, "chat": 3, "batch": 3, "keys": 3}.get(scopes[0], 2) if len(scopes) == 1 else 10
    assert len(set(links) - {""}) + 1 == expected, links


async def _counts(gateway: RunningGateway) -> list[tuple[int, ...]]:
    tables = ("api_key", "tenant", "webhook", "credit", "price_sheet", "batch", "audit_log", "invoice")
    return [tuple((await gateway.sql(f"SELECT count(*) FROM {table}"))[0]) for table in tables]


async def test_an_address_without_a_page_is_a_page_that_says_so(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as one:
        page = await one.get("/nowhere/at/all")
        assert (page.status, "There is no such page." in page.words, "Sign out" in page.words) == (404, True, True)
        assert (await one.get("/")).path == "/console"


@pytest.mark.parametrize("is_told", [True, False], ids=["content-length", "chunked"])
async def test_attack_F16_the_sign_in_form_is_short(shared_gateway: RunningGateway, is_told: bool) -> None:
    """Without a key, forms of 2 MiB of escapes were read, held, and decoded on the loop for most of a second each."""
    form = b"key=" + b"%41" * 20_000

    async def pieces() -> AsyncIterator[bytes]:
        yield form

    headers = {"content-type": "application/x-www-form-urlencoded"}
    async with shared_gateway.session("") as stranger:
        data = form if is_told else pieces()
        async with stranger.post("/console/sign-in", data=data, headers=headers) as answer:
            assert answer.status == 413
        async with stranger.post("/console/sign-in", data={"key": "hg_live_none"}) as answer:
            assert answer.status == 401


async def test_attack_F16_a_long_form_is_parsed_when_it_is_its_tenants_turn(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two megabytes of escapes take most of a second, which every stream waited for."""
    tenants: list[str] = []
    work = shared_gateway.app[TEXT_WORK]
    run = work.run

    async def noted(tenant: str, units: int, function: Callable[[], Any]) -> Any:
        tenants.append(tenant)
        return await run(tenant, units, function)

    monkeypatch.setattr(work, "run", noted)
    tenant, key = await shared_gateway.new_tenant("long forms", [*api_keys.TENANT_SCOPES])
    async with signed_in(shared_gateway, key) as viewer:
        form = {"form_token": (await viewer.get("")).form_token, "name": "%" * 50_000}
        async with viewer.session.post("/console/keys", data=form, allow_redirects=False) as answer:
            assert answer.status == 400, await answer.text()
    assert tenants == [tenant]
