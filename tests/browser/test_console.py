"""The console in a real browser: every screen of every role at two widths, and one journey from a key to an invoice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import console_history
import pytest
from console_history import Owner
from running import Server

from accounting.database.db import Database
from gateway.console.navigation import screens_of

from .conftest import SHOTS, SIZES

pytestmark = pytest.mark.timeout(600)


class Visitor:
    """One person's browser window. It notes what a page logged as an error and what it asked other hosts for."""

    def __init__(self, page: Any, base: str) -> None:
        self.page = page
        self.base = base
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._note)

    def _note(self, request: Any) -> None:
        if urlsplit(request.url).scheme != "data" and not request.url.startswith(self.base):
            self.elsewhere.append(request.url)

    def sign_in(self, key: str) -> None:
        self.page.goto(self.base + "/console")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(self.base + "/console")

    def open(self, path: str) -> None:
        answer = self.page.goto(self.base + "/console" + path)
        assert answer.status < 400, (path, answer.status, self.page.inner_text("main"))

    def check(self, name: str) -> None:
        """axe finds nothing, nothing was logged, nothing came from elsewhere; a picture is kept."""
        from axe_playwright_python.sync_playwright import Axe

        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)
        found = Axe().run(self.page)
        assert found.violations_count == 0, f"{name}: {found.generate_report()}"
        assert self.errors == []
        assert self.elsewhere == []
        wide = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name}: the page is {wide} px too wide"


@contextlib.contextmanager
def visitor(chromium: Any, server: Server, key: str, size: str, **options: Any) -> Iterator[Visitor]:
    context = chromium.new_context(viewport=SIZES[size], accept_downloads=True, **options)
    try:
        one = Visitor(context.new_page(), server.ready["base_url"])
        one.sign_in(key)
        yield one
    finally:
        context.close()


@dataclass(frozen=True)
class Used:
    """A server with two months of three tenants, so that no screen is empty."""

    server: Server
    owner: Owner

    def key_of(self, role: str) -> str:
        return self.server.ready["admin_key"] if role == "operator" else self.owner.key


@pytest.fixture(scope="module")
def used(server: Server) -> Used:
    async def fill() -> Sequence[Owner]:
        database = Database(f"sqlite+aiosqlite:///{server.home / 'headgate.db'}")
        try:
            return await console_history.fill(database, (server.home / "secrets" / "pepper").read_bytes(), server.model)
        finally:
            await database.close()

    with ThreadPoolExecutor() as pool:  # playwright runs a loop in this thread
        owner = pool.submit(lambda: asyncio.run(fill())).result()[0]
    server.admin(
        "POST",
        "/admin/v1/budgets",
        json={"project_id": owner.tenant_id, "period": "month", "limit_micro_units": 150_000_000, "hard": True},
    )
    client = server.client(owner.key)
    for number in range(3):
        client.chat.completions.create(
            model=server.model, max_tokens=8, user="maria", messages=[{"role": "user", "content": f"Hello {number}"}]
        )
    return Used(server, owner)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("role", ["operator", "admin"])
def test_every_screen_is_readable_and_stays_on_this_host(
    chromium: Any, used: Used, role: str, size: str, scheme: str
) -> None:
    with visitor(chromium, used.server, used.key_of(role), size, color_scheme=scheme) as one:
        for screen in screens_of(role):
            one.open(screen.path)
            one.check(f"{role}-{size}-{scheme}{screen.path.replace('/', '-') or '-home'}")


@pytest.mark.parametrize(("size", "scheme"), [("desktop", "dark"), ("phone", "light")])
def test_the_pages_behind_the_tables_are_readable_too(chromium: Any, used: Used, size: str, scheme: str) -> None:
    tenant = used.owner.tenant_id
    with visitor(chromium, used.server, used.key_of("operator"), size, color_scheme=scheme) as one:
        paths = [
            f"/tenants/{tenant}",
            f"/tenants/{tenant}/billing",
            f"/keys?project_id={tenant}",
            f"/keys/{used.owner.key_id}",
        ]
        paths += ["/keys/new", "/issuer", "/prices/edit?like=history-3@1", "/prices/history-3/1", "/cache/prefixes"]
        paths += ["/prices/month?sheet=history-3@1&change_percent=-5"]
        paths += [f"/usage/changes?project_id={tenant}", "/usage/labels", f"/usage?group=tenant&project_id={tenant}"]
        first = time.strftime("%Y-%m", time.gmtime(time.time() - (console_history.NUM_DAYS - 1) * 86_400))
        paths += [f"/invoices/draft?project_id={tenant}&period={first}"]  # that of a later month waits for it
        for screen in ("/requests?status_class=2xx&outcome=ok", "/sessions", "/workers"):
            one.open(screen)
            link = one.page.locator("tbody td a[href*='/console']").first
            paths.append(link.get_attribute("href").removeprefix("/console"))
        for path in paths:
            one.open(path)
            one.check(f"page-{size}-{scheme}{re.sub('[^a-z]+', '-', path.partition('?')[0])[:40]}")


def test_times_of_the_list_of_requests_are_the_viewers_on_its_axis_and_in_its_filters(
    chromium: Any, used: Used
) -> None:
    """In Tokyo a time that is copied from the table finds its request. Addresses stay UTC."""
    with visitor(chromium, used.server, used.owner.key, "desktop", timezone_id="Asia/Tokyo") as one:
        page = one.page
        one.open("/requests")
        begins = page.locator("p.hint time").first
        axis = page.locator("svg.below text").first
        assert axis.text_content() == begins.inner_text()[11:16], "both are the start of the first bar"
        assert "(UTC)" not in page.inner_text("main")
        shown = page.locator("tbody time").first
        typed, utc = shown.inner_text(), shown.get_attribute("datetime")
        page.get_by_label("From").fill(typed.replace(" ", "T")[:16])
        page.get_by_role("button", name="Filter").click()
        page.wait_for_url(f"**from={utc[:16].replace(':', '%3A')}*")
        assert page.locator("tbody time").first.inner_text() == typed
        assert page.get_by_label("From").input_value()[:16] == typed.replace(" ", "T")[:16]
        page.get_by_role("button", name="Filter").click()
        page.wait_for_url(f"**from={utc[:16].replace(':', '%3A')}*")
        one.check("requests-in-tokyo")


def test_from_a_new_key_to_a_charge_a_batch_and_an_invoice(chromium: Any, used: Used) -> None:
    """An operator makes a key and closes a month; the key's owner chats, finds the request with its waterfall, watches a
    batch to its end and downloads the invoice."""
    used_server, tenant = used.server, used.owner.tenant_id
    month = console_history.last_month(time.time())
    with visitor(chromium, used_server, used_server.ready["admin_key"], "desktop") as operator:
        page = operator.page
        operator.open(f"/keys/new?project_id={tenant}")
        page.get_by_label("Name").fill("journey")
        for scope in ("chat", "batch", "files:read", "files:write", "usage:read"):
            page.locator(f'input[name="scopes"][value="{scope}"]').check()
        page.get_by_role("button", name="Make the key").click()
        key = page.locator("pre.copy").inner_text().strip()
        assert key.startswith("hg_live_")
        operator.check("journey-1-key")
        operator.open("/invoices")
        page.get_by_label("Month to close (2026-10)").fill(month)
        page.get_by_label("I know that a closed month is never opened again").check()
        page.get_by_role("button", name="Close").click()
        page.get_by_text(f"Closed {month}: 3 invoices were made.").wait_for()
        operator.check("journey-2-closed")
    with visitor(chromium, used_server, key, "desktop") as owner:
        page = owner.page
        owner.open("/playground")
        page.get_by_label("Message").fill("What does json.dumps do?")
        page.get_by_label("Most tokens of output").fill("16")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("link", name="The request").wait_for(timeout=30_000)
        owner.check("journey-3-answer")
        request_id = page.get_by_role("link", name="The request").get_attribute("href").rpartition("/")[2]
        page.wait_for_timeout(2_000)
        owner.open("/requests")
        assert request_id in page.content(), "the request log has a request after two seconds"
        owner.open(f"/requests/{request_id}")
        assert {"prefill", "decode", "settle"} <= set(page.inner_text("table.waterfall").split())
        owner.check("journey-4-waterfall")
        body = {"model": used_server.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        lines = [
            {"custom_id": f"line-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(3)
        ]
        owner.open("/batches")
        page.get_by_label("Lines of JSON").fill("\n".join(json.dumps(line) for line in lines))
        page.get_by_role("button", name="Submit").click()
        owner.check("journey-5-running")
        page.get_by_role("link", name="Results", exact=True).wait_for(timeout=60_000)  # the page shows itself anew
        owner.check("journey-6-batch")
        with page.expect_download() as download:
            page.get_by_role("link", name="Results", exact=True).click()
        answers = [json.loads(line) for line in download.value.path().read_text().splitlines()]
        assert {answer["custom_id"] for answer in answers} == {"line-0", "line-1", "line-2"}
        assert all(answer["response"]["status_code"] == 200 for answer in answers)
        owner.open("/invoices")
        page.get_by_role("link", name="INV-").click()
        page.get_by_role("link", name="PDF").wait_for()
        assert used.owner.tenant_id in page.inner_text("main")
        owner.check("journey-7-invoice")
        with page.expect_download() as download:
            page.get_by_role("link", name="PDF").click()
        assert download.value.path().read_bytes().startswith(b"%PDF-")
