"""A fault of the console itself, planted: the browser gets a page, and the operator what a fault of the API gives."""

from __future__ import annotations

from console_pages import signed_in

from gateway.telemetry.keys import OBSERVERS

PLACES = {
    "/console/requests": "gateway.console.viewer.Viewer.get",
    "/console": "gateway.console.sessions.find",
    "/v1/models": "gateway.generation.models.Models.visible",
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
            assert records == [(500, "")]
