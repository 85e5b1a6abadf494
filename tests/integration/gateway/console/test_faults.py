"""A fault of the console itself, planted: the browser gets a page, and the operator what a fault of the API gives."""

from __future__ import annotations

import io
import json
import logging
import threading

from console_pages import signed_in

from gateway.base.app_keys import LIFECYCLE
from gateway.console import pages, tables
from gateway.console.pages import MAX_FORM_BYTES, MAX_OPEN_FORM_BYTES
from gateway.http.auth import AUTH
from gateway.intake.intake import INTAKE
from gateway.telemetry.keys import OBSERVERS
from workers.process.logs import JsonFormatter

PLACES = {
    "/console/requests": "gateway.console.viewer.Viewer.get",
    "/console": "gateway.console.sessions.find",
    "/v1/models": "gateway.generation.served.models.Models.visible",
}


async def test_a_fault_is_a_page_with_the_requests_id_and_is_logged_and_counted(gateway, monkeypatch, caplog):
    records = []
    gateway.app[OBSERVERS].of_each(lambda record: records.append((record.status, record.error_code)))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted: a secret")

    async with signed_in(gateway) as browser, gateway.session() as api:
        for path, place in PLACES.items():
            assert (await browser.get("")).status == 200
            records.clear()
            caplog.clear()
            with monkeypatch.context() as patched:
                patched.setattr(place, fail)
                if path.startswith("/console"):
                    page = await browser.get(path.removeprefix("/console"))
                    assert page.headers["content-type"] == "text/html; charset=utf-8"
                    assert page.headers["x-request-id"] in page.words
                    assert page.headers["content-security-policy"].startswith("default-src 'none'")
                    assert page.headers["connection"] == "close"
                    assert page.status == 500 and "planted" not in page.text
                else:
                    async with api.get(path) as answer:
                        assert answer.status == 500
            [logged] = [r for r in caplog.records if r.getMessage() == "unhandled_exception"]
            assert "planted" in str(logged.exc_info[1])
            if path.startswith("/console"):
                assert logged.request_id == page.headers["x-request-id"]
            assert records == [(500, "")]


async def test_what_is_refused_before_the_handler_is_a_page_too(gateway):
    async with signed_in(gateway) as browser:
        gateway.app[LIFECYCLE].accepting = False
        page = await browser.get("/requests")
        gateway.app[LIFECYCLE].accepting = True
        assert (page.status, page.headers["content-type"]) == (503, "text/html; charset=utf-8")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert "The server is shutting down." in page.words
        assert page.headers["retry-after"]
    reader, writer = await gateway.socket()
    writer.write(b"POST /console/batches HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (MAX_FORM_BYTES + 1))
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 413 ") and b"text/html" in head


async def test_what_is_sent_to_a_page_that_takes_nothing_is_a_page_and_no_bad_key(gateway):
    """It was JSON that spoke of an API key, and counted against the address."""
    bad_keys = gateway.app[AUTH]._bad_keys
    async with signed_in(gateway) as browser:
        for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
            for path in ("", "/", "/requests", "/prices", "/zzz"):
                async with browser.session.request(method, "/console" + path, data=b"x") as answer:
                    assert (answer.status, answer.headers["allow"]) == (405, "GET"), (method, path)
                    assert answer.headers["content-type"] == "text/html; charset=utf-8"
                    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
                    told = f"{method} of this page is not offered: use GET."
                    assert method == "HEAD" or told in await answer.text()
        while not bad_keys.blocked_ms("127.0.0.1"):
            bad_keys.take("127.0.0.1")
        assert (await browser.submit("/zzz")).status == 405
    async with gateway.session("") as stranger, stranger.post("/console/zzz") as answer:
        assert (answer.status, answer.content_type) == (405, "text/html")


async def test_a_form_is_held_bytes_of_its_tenant(gateway, monkeypatch):
    """A signed-in key could hold 2 MiB on each of its connections, which nothing counted."""
    intake = gateway.app[INTAKE]
    async with signed_in(gateway) as browser:
        await browser.get("/playground")
        monkeypatch.setattr(intake, "_most_held", 3000)
        page = await browser.submit("/playground/code", text="x" * 4000)
        assert (page.status, intake.refusals["body_bytes_held"]) == (429, 1)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        monkeypatch.undo()
        assert (await browser.submit("/sign-out", text="x" * MAX_OPEN_FORM_BYTES)).status == 413
    assert not intake.num_held


async def test_a_file_is_made_off_the_loop(gateway, monkeypatch):
    """Ten thousand rows took the loop for a third of a second."""
    made_in = []

    def to_csv(table: tables.Table) -> str:
        made_in.append(threading.current_thread())
        return "made"

    monkeypatch.setattr(tables, "to_csv", to_csv)
    monkeypatch.setattr(pages, "MAX_CELLS_INLINE", -1)
    async with signed_in(gateway) as browser:
        page = await browser.get("/requests?format=csv")
        assert (page.status, page.text) == (200, "made")
        assert page.headers["content-disposition"] == 'attachment; filename="headgate-requests.csv"'
        assert (await browser.get("/requests?format=xml")).status == 400
    assert made_in and threading.main_thread() not in made_in


async def test_the_line_of_a_fault_names_its_request(gateway, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError

    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    monkeypatch.setattr("gateway.generation.served.models.Models.visible", fail)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    parent = f"00-{'a' * 32}-{'b' * 16}-00"
    async with gateway.session() as api, api.get("/v1/models", headers={"traceparent": parent}) as answer:
        request_id, trace = answer.headers["x-request-id"], answer.headers["traceresponse"]
    [line] = [
        line for line in map(json.loads, written.getvalue().splitlines()) if line["event"] == "unhandled_exception"
    ]
    assert line["request_id"] == request_id
    assert trace.startswith(f"00-{line['trace_id']}-{line['span_id']}-")
    assert line["tenant"].startswith("proj_")
