"""The pages of conversations: sums, turns in their order, and the turn that lost the cache."""

from __future__ import annotations

import csv
import io
import re
import time
from html import unescape
from typing import Any

import pytest
from console_pages import signed_in
from gateways import MODEL, RunningGateway
from yarl import URL

from accounting.requests import request_log
from accounting.requests.request_log import LoggedRequest
from gateway.base.app_keys import DATABASE
from gateway.console.screens.traffic import sessions

pytestmark = pytest.mark.asyncio(loop_scope="module")
START_MS = (int(time.time()) - 600) * 1000
PROBE = "<script>alert(1)</script>\"'/../?&#"


REFUSED = {"status": 429, "outcome": "refused", "is_tail": True, "charge": 0}


async def say(
    gateway: RunningGateway, session_id: str, *turns: tuple[int, int, int], refused: int = -1, **fields: Any
) -> list[str]:
    """Rows of a conversation: (tokens of the prompt, cached ones, ones that were written to the cache) of each turn. The
    turn at the place `refused` was refused."""
    rows = []
    for number, (prompt, cached, written) in enumerate(turns):
        at_ms = START_MS + number * 1000
        row = {
            "request_id": f"req_{at_ms:012x}7{hash(session_id) % 16**12:012x}{number:07x}",
            "is_tail": False,
            "started_at_ms": at_ms,
            "tenant_id": gateway.keys.tenant_id,
            "key_id": "key_1",
            "endpoint": "POST /v1/chat/completions",
            "model": MODEL,
            "status": 200,
            "outcome": "ok",
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "cache_write_tokens": written,
            "charge": 10,
            "currency": "USD",
            "session_id": session_id,
            **fields,
            **(REFUSED if number == refused else {}),
        }
        rows.append(LoggedRequest(**row))
    async with gateway.app[DATABASE].write() as conn:
        await request_log.add(conn, rows)
    return [row.request_id for row in rows]


async def test_turns_are_in_order_and_the_one_that_lost_the_cache_is_marked(shared_gateway: RunningGateway) -> None:
    # A long message lowers the share of the third turn and breaks nothing; the fourth turn is new from its 20th token, and
    # the fifth one has a new beginning and less history: its prompt did not grow, and nothing of it was cached.
    turns = (100, 0, 96), (150, 96, 48), (400, 144, 240), (450, 16, 416), (60, 0, 48), (500, 432, 64)
    why = {"miss_reason": "diverged", "diverged_at_token": 20}
    ids = await say(shared_gateway, "talk", *turns, **why)
    async with signed_in(shared_gateway) as tenant:
        page = await tenant.get("/sessions")
        [row] = [
            row
            for row in csv.DictReader(io.StringIO((await tenant.get("/sessions?format=csv")).text))
            if row["id"] == "talk"
        ]
        assert (row["num_requests"], row["charge_micro_units"]) == ("6", "60")
        assert 'href="/console/sessions/show?session=talk"' in page.text
        page = await tenant.get("/sessions/show?session=talk")
        assert "2 turns broke the prefix" in page.words
        rows = list(csv.DictReader(io.StringIO((await tenant.get("/sessions/show?session=talk&format=csv")).text)))
        assert [row["id"] for row in rows] == ids
        assert [bool(row["broke"]) for row in rows] == [False, False, False, True, True, False]
        assert rows[3]["broke"].startswith("at token 20: the text changes here")
        assert "Conversation talk" in (await tenant.get(f"/requests/{ids[0]}")).words


async def test_turns_have_one_number_on_every_page_and_the_first_of_a_page_is_judged(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page began with turn 1, which no turn before it could show as broken."""
    monkeypatch.setattr(sessions, "PAGE_ROWS", 3)
    turns = (100, 0, 96), (150, 96, 48), (160, 0, 0), (200, 16, 176), (240, 192, 32), (280, 224, 48)
    await say(shared_gateway, "long", *turns, refused=2)
    async with signed_in(shared_gateway) as tenant:
        newest = await tenant.get("/sessions/show?session=long")
        file = await tenant.get("/sessions/show?session=long&format=csv")
        [link] = re.findall(r'href="/console(/sessions/show[^"]*)">Earlier turns', newest.text)
        older = await tenant.get(unescape(link))
    assert re.findall(r"<title>turn (\d+):[^<]*</title>", newest.text) == ["4", "5", "6"] * 2
    assert "1 turn broke the prefix" in newest.words
    assert re.findall(r"<title>turn (\d+):[^<]*</title>", older.text) == ["1", "2", "3"] * 2
    assert "Earlier turns" not in older.words
    rows = list(csv.DictReader(io.StringIO(file.text)))
    assert [row["turn"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [bool(row["broke"]) for row in rows] == [False, False, False, True, False, False]
    assert [rows[place]["cached_tokens"] for place in (2, 3)] == ["", "16"]


async def test_a_page_without_a_conversation_is_refused(shared_gateway: RunningGateway) -> None:
    """It showed all requests as one conversation, to the operator those of all tenants."""
    for key in (None, shared_gateway.keys.admin_key):
        async with signed_in(shared_gateway, key) as viewer:
            page = await viewer.get("/sessions/show")
            assert (page.status, "Missing required parameter: 'session'." in page.words) == (400, True)


async def test_a_conversations_name_is_inert_and_finds_its_page(shared_gateway: RunningGateway) -> None:
    await say(shared_gateway, PROBE, (10, 0, 0))
    for key, query in ((None, {}), (shared_gateway.keys.admin_key, {"project_id": shared_gateway.keys.tenant_id})):
        async with signed_in(shared_gateway, key) as viewer:
            page = await viewer.get("/sessions")
            assert "<script>alert" not in page.text
            address = str(URL.build(path="/sessions/show", query={"session": PROBE, **query}))
            page = await viewer.get(address)
            assert (page.status, "<script>alert" in page.text, PROBE in page.words) == (200, False, True)
            assert "turn 1: 10 tokens of prompt" in page.words


async def test_another_tenants_conversation_of_the_same_name_is_another(shared_gateway: RunningGateway) -> None:
    await say(shared_gateway, "shared name", (10, 0, 0))
    _, key = await shared_gateway.new_tenant("neighbour", ["usage:read"])
    async with signed_in(shared_gateway, key) as other:
        assert "No conversation was found" in (await other.get("/sessions")).words
        query = f"session=shared%20name&project_id={shared_gateway.keys.tenant_id}"
        assert "has no request in the log" in (await other.get(f"/sessions/show?{query}")).words
    async with signed_in(shared_gateway, shared_gateway.keys.admin_key) as operator:
        page = await operator.get("/sessions/show?session=shared%20name")
        assert (page.status, "needs 'project_id'" in page.words) == (400, True)
