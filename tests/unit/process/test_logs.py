"""Log lines: one record is one line of JSON, whatever is in it (attacks F05 and F06)."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import re
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from workers.process import logs

SECRET = "a" * 43
KEY = f"hg_live_0123456789_{SECRET}_000000"


def line(**extra: Any) -> dict[str, Any]:
    record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "event", **extra})
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    assert text.isascii()
    parsed: dict[str, Any] = json.loads(text)
    return parsed


@pytest.mark.parametrize(
    "value",
    ["a\nb\r\n", "\x1b[31mred\x1b[0m", "\u2028\u2029", "%s %d {x}", "\x00\x7f", "x" * 1_000_000, "日本", "\ud800"],
)
def test_attack_F05_a_hostile_value_is_one_harmless_line(value: str) -> None:
    shown = line(client=value)["client"]
    assert len(shown) <= 1024
    assert shown.isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "duplicate key\nDETAIL:  Key (name)=(a tenant's words) already exists.",
        "null value\nDETAIL:  Failing row contains (a tenant's words,\nand more).\n[SQL: INSERT INTO x]",
    ],
)
def test_the_values_of_a_row_that_postgresql_refused_are_in_no_line(text: str) -> None:
    try:
        raise ValueError("outer") from ValueError(text)
    except ValueError as error:
        written = line(exc_info=(type(error), error, error.__traceback__))["error"]
    assert ("words" in written, "and more" in written) == (False, False)
    assert text.partition("\n")[0] in written
    assert ("[SQL" in text) == ("[SQL" in written)


@pytest.mark.parametrize(
    "text", [KEY, f"Bearer {KEY}", "Cookie: session=abc", f"x{KEY}y", f"hg_batch_1_{SECRET}", f"hg_run_1_{SECRET}"]
)
def test_attack_F06_keys_are_redacted_wherever_they_stand(text: str) -> None:
    written = json.dumps(line(client=text, msg=f"saw {text}"))
    assert SECRET not in written
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


def test_access_lines_are_never_too_many() -> None:
    repeats = logs.Repeats()
    record = logging.makeLogRecord({"name": "gateway.access", "msg": "request", "created": 100.0})
    assert all(repeats.filter(record) for _ in range(15))


def test_a_named_event_has_its_message_beside_it_and_each_line_says_which_process() -> None:
    record = logging.makeLogRecord(
        {"name": "x", "levelname": "INFO", "msg": "hello %s", "args": ("you",), "event": "link_lost", "link": 3}
    )
    found = json.loads(logs.JsonFormatter(worker="worker-1").format(record))
    assert (found["event"], found["msg"], found["link"]) == ("link_lost", "hello you", 3)
    assert (found["level"], found["worker"], found["logger"]) == ("INFO", "worker-1", "x")
    assert line()["event"] == "event"
    assert "msg" not in line()


def test_an_error_is_told_with_what_it_was_raised_from() -> None:
    def inner() -> None:
        raise KeyError("inside")

    try:
        try:
            inner()
        except KeyError as cause:
            raise ValueError("outside") from cause
    except ValueError as error:
        found = line(exc_info=(type(error), error, error.__traceback__))
    assert found["error"] == "ValueError: outside from KeyError: 'inside'"
    assert found["at"][-1].endswith(" inner")
    assert len(found["at"]) == 3


def test_a_process_writes_its_lines_and_pythons_warnings_to_stderr() -> None:
    code = (
        "import logging, warnings; from workers.process import logs; logs.configure('INFO', worker='w');"
        "logging.getLogger('a').info('began'); logging.getLogger('kombu').info('a step'); warnings.warn('beware')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = [json.loads(text) for text in ended.stderr.splitlines()]
    assert [(one["level"], one["logger"], one["worker"]) for one in told] == [
        ("INFO", "a", "w"),
        ("WARNING", "py.warnings", "w"),
    ]
    assert "beware" in told[1]["event"]


class Screen(io.StringIO):
    """A stream that says of itself whether it is a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "form", "text"),
    [(True, None, True), (False, None, False), (True, "json", False), (False, "text", True)],
)
def test_a_person_at_a_terminal_reads_text_and_programs_read_json_unless_the_operator_chooses(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, form: str | None, text: bool
) -> None:
    screen, root = Screen(is_terminal=is_terminal), logging.getLogger()
    monkeypatch.setattr(sys, "stderr", screen)
    for flag in ("logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, flag, getattr(logging, flag))
    monkeypatch.delenv(logs.FORM, raising=False)
    if form is not None:
        monkeypatch.setenv(logs.FORM, form)
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("root", *logs.QUIET)}
    try:
        logs.configure("INFO", worker="worker-1")
        logging.getLogger("x").info("hello %s", "you", extra={"event": "link_lost", "link": 3})
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    (written,) = screen.getvalue().splitlines()
    if text:
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    link_lost - hello you worker=worker-1 link=3", written)
    else:
        assert json.loads(written)["event"] == "link_lost"


def test_text_for_a_person_is_as_harmless_as_json_and_has_places_below() -> None:
    try:
        raise ValueError(f"bad {KEY}")
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    record = logging.makeLogRecord(
        {"name": "x", "levelname": "ERROR", "msg": "failed", "client": "a\nb\x1b[31m", "exc_info": caught}
    )
    first, *places = logs.TextFormatter().format(record).split("\n")
    assert KEY not in first
    assert "error=ValueError: bad [redacted]" in first
    assert "client=a\\u000ab\\u001b[31m" in first
    assert [place.startswith("    ") and "test_logs.py" in place for place in places] == [True]


def test_lines_of_one_pass_are_one_write_in_their_order() -> None:
    writes: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    handler, root = logs.Lines(Stream()), logging.getLogger()
    handler.setFormatter(logs.JsonFormatter())
    root.addHandler(handler)
    try:
        made = [logging.makeLogRecord({"name": "x", "levelno": 20, "msg": f"event {number}"}) for number in range(3)]
        logs.handle_together(logging.getLogger("x"), made)
        logging.getLogger("x").handle(made[0])
    finally:
        root.removeHandler(handler)
    assert [json.loads(one)["event"] for one in writes[0].splitlines()] == ["event 0", "event 1", "event 2"]
    assert len(writes[0].splitlines()) == 3
    assert json.loads("".join(writes[1:]))["event"] == "event 0"


class Handled:
    log_ids: ClassVar = {"request_id": "req_1", "tenant": "proj_1", "trace_id": "a" * 32}


def line_within(handled: Handled | None, **extra: Any) -> dict[str, Any]:
    def written() -> dict[str, Any]:
        logs.HANDLED.set(handled)
        return line(**extra)

    return contextvars.Context().run(written)


def test_a_line_names_the_request_that_is_handled() -> None:
    assert line_within(Handled()).items() >= Handled.log_ids.items()
    assert line_within(Handled(), request_id="req_1")["tenant"] == "proj_1"
    assert line_within(Handled(), tenant="proj_2")["tenant"] == "proj_2"
    assert "request_id" not in line_within(None)


def test_a_line_about_another_request_has_none_of_the_ids() -> None:
    written = line_within(Handled(), request_id="req_2")
    assert (written["request_id"], "tenant" in written, "trace_id" in written) == ("req_2", False, False)
