from __future__ import annotations

import json

import pytest

from gateway.telemetry import access_log
from gateway.telemetry.record import RequestRecord


def test_the_access_line_has_the_route_template_and_no_header(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord("req_1", "POST", route="/v1/models/{id}", status=200, traceparent="evil")
    with caplog.at_level("INFO", logger="gateway.access"):
        access_log.write([record])
    [entry] = caplog.records
    assert entry.route == "/v1/models/{id}"
    assert "evil" not in json.dumps(entry.__dict__, default=str)
