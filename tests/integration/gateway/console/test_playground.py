"""The playground: the answer with its cost, with a script and without one, and the same request for elsewhere."""

from __future__ import annotations

import ast
import json
import re
from html import unescape

import pytest
from console_pages import signed_in
from gateways import MODEL, RunningGateway

from gateway.console.screens.traffic.playground import body_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBE = "<script>alert(1)</script>\"'\N{GRINNING FACE}"
ASKED = {"model": MODEL, "system": "Be brief.", "message": PROBE, "max_tokens": "8", "temperature": "0.5"}


async def test_without_a_script_the_page_has_the_answer_and_its_cost(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        await tenant.get("/playground")
        page = await tenant.submit("/playground", **ASKED)
        assert page.status == 200
        assert "output 8 tokens" in page.words
        assert re.search(r"0\.\d{6} USD", page.words)
        assert "<script>alert" not in page.text
        assert PROBE in unescape(page.text)
        [request_id] = re.findall(r"/console/requests/(req_[0-9a-f]+)", page.text)
        await shared_gateway.settled()
        [entry] = await shared_gateway.sql(
            "SELECT charge, output FROM ledger_entry WHERE request_id = :i", i=request_id
        )
        assert (f"{entry.charge / 1e6:.6f} USD" in page.words, entry.output) == (True, 8)


async def test_code_is_shown_and_nothing_is_sent(shared_gateway: RunningGateway) -> None:
    before = await shared_gateway.sql("SELECT count(*) FROM ledger_entry")
    async with signed_in(shared_gateway) as tenant:
        await tenant.get("/playground")
        page = await tenant.submit("/playground/code", **ASKED)
    curl, python = (unescape(block) for block in re.findall(r'<pre class="copy">(.*?)</pre>', page.text, re.S))
    assert "$HEADGATE_API_KEY" in curl
    assert shared_gateway.keys.api_key not in page.text
    [call] = [node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call) and len(node.keywords) == 4]
    assert {word.arg: ast.literal_eval(word.value) for word in call.keywords} == body_of(ASKED)
    assert await shared_gateway.sql("SELECT count(*) FROM ledger_entry") == before


async def test_the_stream_comes_as_the_api_sends_it(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        token = (await tenant.get("/playground")).form_token
        headers = {"x-form-token": token}
        page = await tenant.submit("/playground/stream", headers, **ASKED)
        assert (page.status, page.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        chunks = [json.loads(line[6:]) for line in page.text.splitlines() if line.startswith("data: {")]
        assert sum(bool(chunk["choices"] and chunk["choices"][0]["delta"].get("content")) for chunk in chunks) > 1
        assert chunks[-1]["usage"]["completion_tokens"] == 8
        assert chunks[-1]["headgate"]["charge_micro_units"] > 0
        refused = await tenant.submit("/playground/stream", headers, **ASKED | {"model": "nobody serves this"})
        assert (refused.status, json.loads(refused.text)["error"]["code"]) == (404, "model_not_found")
        stranger = await tenant.submit("/playground/stream", {"x-form-token": "0" * 64}, **ASKED)
        assert stranger.status == 403


async def test_a_refused_form_keeps_its_values(shared_gateway: RunningGateway) -> None:
    async with signed_in(shared_gateway) as tenant:
        await tenant.get("/playground")
        for wrong, sentence in (("temperature", "'temperature' must be a number."), ("max_tokens", "a whole number")):
            page = await tenant.submit("/playground", **ASKED | {wrong: "warm"})
            assert sentence in page.words
            assert ("Be brief." in page.text, 'value="warm"' in page.text) == (True, True)
        page = await tenant.submit("/playground", **ASKED | {"max_tokens": "99999"})
        assert ('role="alert"' in page.text, 'value="99999"' in page.text) == (True, True)


async def test_a_key_that_may_not_chat_is_told_so(shared_gateway: RunningGateway) -> None:
    _, key = await shared_gateway.new_tenant("reader", ["usage:read"])
    async with signed_in(shared_gateway, key) as reader:
        page = await reader.get("/playground")
        assert "Playground</a>" not in page.text
        page = await reader.submit("/playground", **ASKED)
        assert "This API key may not do this." in page.words
