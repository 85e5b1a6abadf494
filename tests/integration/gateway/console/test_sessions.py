"""Who is let in, how long, and what other sites can do with a session: nothing."""

from __future__ import annotations

import asyncio
import time

import pytest
from console_pages import CSP, browser, signed_in
from gateways import RunningGateway
from sqlalchemy import update

from accounting.tables.models import ApiKey
from gateway.app import routes
from gateway.base.app_keys import DATABASE, REDIS
from gateway.console import sessions
from gateway.console.signing_in import _own_path
from gateway.http.auth import AUTH

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPEN = {"/console/sign-in", "/console/assets/{version}/{name}"}
PAGES = [route for route in routes() if route.scope == "console" and route.path not in OPEN and route.method != "*"]


async def test_every_page_without_a_session_leads_to_the_sign_in_page(shared_gateway: RunningGateway) -> None:
    async with browser(shared_gateway) as stranger:
        for route in PAGES:
            path = route.path.replace("{", "").replace("}", "")
            async with stranger.session.request(route.method, path, allow_redirects=False) as answer:
                assert (answer.status, answer.headers["location"].partition("?")[0]) == (303, "/console/sign-in"), path
                assert answer.headers["content-security-policy"].startswith(CSP)
        page = await stranger.get("/requests?model=x")
        assert page.path == "/console/sign-in?next=/console/requests?model%3Dx"
        page = await stranger.submit("/sign-in", key=shared_gateway.keys.api_key, next="/console/requests?model=x")
        assert page.path == "/console/requests?model=x"


async def test_a_page_keeps_other_hosts_and_frames_out(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        page = await tenant.get("/requests")
        assert page.headers["content-security-policy"].startswith(CSP)
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["cache-control"] == "no-store"
        assert "style=" not in page.text
        assert "http://" not in page.text
        assert "https://" not in page.text
        for path in ("console.css", "console.js"):
            [address] = [part for part in page.text.split('"') if part.endswith(path)]
            asset = await tenant.get(address.removeprefix("/console"))
            assert "immutable" in asset.headers["cache-control"]
        assert (await tenant.get("/assets/0/..%2fpages.py")).status == 404


async def test_a_wrong_key_a_batch_key_and_a_suspended_tenant_are_turned_away(shared_gateway: RunningGateway) -> None:
    async with browser(shared_gateway) as stranger:
        for key in ("", "hg_live_nonsense", "\u2603", "a\r\nb: c", "x" * 5000):
            page = await stranger.sign_in(key)
            assert page.status == 401
            assert "Incorrect API key provided." in page.words
            assert "Sign out" not in page.words
        tenant_id, key = await shared_gateway.new_tenant("suspended")
        async with shared_gateway.app[DATABASE].write() as conn:
            await conn.exec_driver_sql(f"UPDATE tenant SET status = 'suspended' WHERE id = '{tenant_id}'")
        page = await stranger.sign_in(key)
        assert (page.status, "This project is suspended." in page.words) == (403, True)


async def test_every_page_of_an_open_session_says_that_its_tenant_is_stopped(shared_gateway: RunningGateway) -> None:
    """Home and the keys said that the key lacks a scope."""
    tenant_id, key = await shared_gateway.new_tenant("stopped")
    async with (
        signed_in(shared_gateway, key) as tenant,
        signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator,
    ):
        for action, status in (("suspend", "suspended"), ("archive", "archived")):
            await operator.get(f"/tenants/{tenant_id}")
            await operator.submit(f"/tenants/{tenant_id}/{action}")
            for path in ("", "/keys", "/models"):
                page = await tenant.get(path)
                assert (page.status, f"This project is {status}." in page.words) == (403, True), path
        assert (await tenant.submit("/sign-out")).path == "/console/sign-in"


async def test_the_cookie_is_out_of_reach_of_scripts_and_new_at_each_sign_in(shared_gateway: RunningGateway) -> None:
    async with browser(shared_gateway) as one:
        one.session.cookie_jar.update_cookies({"headgate_console": "f" * 43})  # planted by somebody else
        async with one.session.post(
            "/console/sign-in", data={"key": shared_gateway.keys.api_key}, allow_redirects=False
        ) as answer:
            cookie = answer.cookies["headgate_console"]
        assert cookie.value != "f" * 43
        assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Lax", "/console")
        assert int(cookie["max-age"]) == sessions.LIFE_S
        before = cookie.value
        await one.sign_in(shared_gateway.keys.api_key)
        client = shared_gateway.app[REDIS]
        assert await sessions.find(client, before) is None, "the old session ended"


async def test_redis_holds_no_key_and_no_cookie(shared_gateway: RunningGateway) -> None:
    client = shared_gateway.app[REDIS]
    made = await sessions.begin(client, "hg_live_secret")
    for name in [key async for key in client.scan_iter("hg:console:*")]:
        assert made.secret.encode() not in name
        kind = await client.type(name)
        value = await client.get(name) if kind == b"string" else b"".join(await client.lrange(name, 0, -1))
        assert b"secret" not in value
        assert made.secret.encode() not in value
        assert 0 < await client.ttl(name) <= sessions.LIFE_S


async def test_signing_in_again_and_again_fills_nothing(shared_gateway: RunningGateway) -> None:
    client = shared_gateway.app[REDIS]
    made = [await sessions.begin(client, "hg_live_many") for _ in range(sessions.MAX_SESSIONS + 5)]
    alive = [one for one in made if await sessions.find(client, one.secret)]
    assert alive == made[5:]


async def test_a_form_needs_its_own_sessions_token_and_comes_from_this_site(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as victim, signed_in(shared_gateway) as attacker:
        await victim.get("/requests")
        theirs = (await attacker.get("/requests")).form_token
        for fields, headers in (
            ({"form_token": ""}, {}),
            ({"form_token": theirs}, {}),
            ({"form_token": "\u2603"}, {}),
            ({}, {"origin": "https://evil.example"}),
            ({}, {"origin": "null"}),
            ({}, {"sec-fetch-site": "cross-site"}),
            ({}, {"sec-fetch-site": "same-site"}),
        ):
            await victim.get("/requests")
            assert (await victim.submit("/sign-out", headers, **fields)).status == 403, (fields, headers)
        assert (await victim.get("/requests", redirects=False)).status == 200
        assert (await victim.submit("/sign-out")).path == "/console/sign-in"
        assert (await victim.get("/requests", redirects=False)).status == 303
        assert (await attacker.get("/requests", redirects=False)).status == 200


async def test_a_form_of_this_site_comes_through_a_proxy(shared_gateway: RunningGateway) -> None:
    """The browser's own verdict counts where it gives one: a proxy may have changed Host. Elsewhere Origin is compared."""
    async with signed_in(shared_gateway) as tenant:
        for headers, status in (
            (
                {"sec-fetch-site": "same-origin", "origin": "https://llm.example.org:8443", "host": "llm.example.org"},
                200,
            ),
            ({"sec-fetch-site": "none"}, 200),
            ({"origin": "https://llm.example.org", "host": "llm.example.org"}, 200),
            ({"origin": "https://llm.example.org", "host": "llm.example.org:443"}, 200),
            ({"origin": "http://llm.example.org:8080", "host": "LLM.example.org:8080"}, 200),
            ({"origin": "http://llm.example.org:8081", "host": "llm.example.org:8080"}, 403),
            ({"origin": "https://llm.example.org.evil.example", "host": "llm.example.org"}, 403),
            ({"sec-fetch-site": "cross-site", "origin": "https://llm.example.org", "host": "llm.example.org"}, 403),
            ({"sec-fetch-site": "same-origin, cross-site"}, 403),
        ):
            await tenant.get("/playground")
            page = await tenant.submit("/playground/code", headers, model="m", message="Hello")
            assert page.status == status, (headers, page.words)


async def test_headers_that_cannot_be_read_are_refused(shared_gateway: RunningGateway) -> None:
    """Origins that are no address, and form tokens and cookies whose bytes are no text."""
    async with signed_in(shared_gateway) as tenant:
        token = (await tenant.get("/playground")).form_token
        [cookie] = [one.value for one in tenant.session.cookie_jar]
    ours = f"cookie: headgate_console={cookie}\r\n".encode()
    for path, headers, status in (
        *(
            (path, b"origin: " + origin + b"\r\nx-form-token: " + token.encode() + b"\r\n" + ours, 403)
            for path in ("sign-in", "sign-out")
            for origin in (
                b"http://[",
                b"http://a:b",
                b"http://a:99999",
                b"null",
                b"\xff",
                b"http://\xff\xfe",
                b"x" * 999,
            )
        ),
        *(
            ("sign-out", b"x-form-token: " + wrong + b"\r\n" + ours, 403)
            for wrong in (b"\xff\xfe", "\u2603".encode(), b"[]", token.encode() + b"0")
        ),
        ("sign-in", b"cookie: headgate_console=\xff\xfe\r\n", 303),
    ):
        body = b"key=" + shared_gateway.keys.api_key.encode()
        reader, writer = await shared_gateway.socket()
        writer.write(
            b"POST /console/" + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + headers
        )
        writer.write(
            b"content-type: application/x-www-form-urlencoded\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 %d " % status), (path, headers, answer[:200])


async def test_nobody_is_signed_in_by_another_site(shared_gateway: RunningGateway) -> None:
    async with browser(shared_gateway) as victim:
        page = await victim.submit("/sign-in", {"origin": "https://evil.example"}, key=shared_gateway.keys.api_key)
        assert page.status == 403
        assert not list(victim.session.cookie_jar)


@pytest.mark.parametrize(
    "path",
    [
        "https://evil.example",
        "//evil.example",
        "/\\evil.example",
        "/console\\..",
        "/consolex",
        "/console/\r\nx: y",
        "/v1",
    ],
)
async def test_the_sign_in_page_leads_to_pages_of_the_console_alone(path: str) -> None:
    assert _own_path(path) == "/console"
    assert _own_path("/console/requests?model=a") == "/console/requests?model=a"


async def test_a_revoked_key_ends_its_sessions(shared_gateway: RunningGateway) -> None:
    tenant_id, key = await shared_gateway.new_tenant("revoked soon")
    async with signed_in(shared_gateway, key) as tenant:
        assert (await tenant.get("/requests", redirects=False)).status == 200
        now = int(time.time())
        async with shared_gateway.app[DATABASE].write() as conn:
            await conn.execute(update(ApiKey).where(ApiKey.tenant_id == tenant_id).values(revoked_at=now))
        shared_gateway.app[AUTH].forget()
        assert (await tenant.get("/requests", redirects=False)).status == 303


async def test_many_pages_at_once_are_answered_by_one_connection_each(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        pages = await asyncio.gather(*(tenant.get("/requests") for _ in range(20)))
        assert {page.status for page in pages} == {200}
