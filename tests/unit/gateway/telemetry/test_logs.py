"""Log lines: one record is one line of JSON, whatever is in it (attacks F05 and F06)."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from gateway.telemetry import logs
from gateway.telemetry.record import RequestRecord

KEY = "hg_live_0123456789_" + "a" * 43 + "_000000"


def line(**extra: Any) -> dict[str, Any]:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "event", **extra})
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    assert text.isascii()
    parsed: dict[str, Any] = json.loads(text)
    return parsed


@pytest.mark.parametrize(
    "value", ["a\nb\r\n", "\x1b[31mred\x1b[0m", "\u2028\u2029", "%s %d {x}", "\x00\x7f", "x" * 1_000_000]
)
def test_attack_F05_a_hostile_value_is_one_harmless_line(value: str) -> None:
    shown = line(client=value)["client"]
    assert len(shown) <= 1024
    assert shown.isprintable()


@pytest.mark.parametrize("text", [KEY, f"Bearer {KEY}", "Cookie: session=abc", f"x{KEY}y"])
def test_attack_F06_keys_are_redacted_wherever_they_stand(text: str) -> None:
    written = json.dumps(line(client=text, msg=f"saw {text}"))
    assert KEY not in written
    assert "session=abc" not in written
    assert "[redacted]" in written


def test_a_traceback_has_places_but_neither_source_nor_values() -> None:
    prompt = "my secret prompt"
    try:
        raise ValueError(f"bad {KEY}")
    except ValueError as error:
        written = json.dumps(line(exc_info=(type(error), error, error.__traceback__)))
    assert "test_logs.py" in written
    assert KEY not in written
    assert prompt not in written


def test_equal_events_in_one_second_are_counted() -> None:
    repeats = logs.Repeats()
    record = logging.makeLogRecord({"name": "x", "msg": "event", "created": 100.0})
    assert [repeats.filter(record) for _ in range(15)] == [True] * 10 + [False] * 5
    later = logging.makeLogRecord({"name": "x", "msg": "event", "created": 101.0})
    assert repeats.filter(later)
    assert later.num_suppressed == 5


def test_the_access_line_has_the_route_template_and_no_header(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord("req_1", "POST", route="/v1/models/{id}", status=200, traceparent="evil")
    with caplog.at_level("INFO", logger="gateway.access"):
        logs.access(record)
    [entry] = caplog.records
    assert entry.route == "/v1/models/{id}"
    assert "evil" not in json.dumps(entry.__dict__, default=str)
