"""Which failed lines of a batch are run again, and what is said of the others."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest

from gateway.cli.api import ApiFailed
from gateway.cli.batch_commands import last_line, to_go_on_with
from gateway.cli.batch_retry import as_value, sort, why_left


def line(number: int, status: int | None, code: str) -> bytes:
    response = None if status is None else {"status_code": status, "request_id": "req_0", "body": {}}
    return json.dumps(
        {"id": f"batch_req_0a_{number}", "response": response, "error": {"code": code, "message": "no"}}
    ).encode()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (None, "batch_cancelled"),
        (None, "batch_expired"),
        (None, "connection_lost"),
        (500, "internal_error"),
        (503, "overloaded"),
        (429, "rate_limit_exceeded"),
        (408, "timeout"),
        (409, "idempotency_conflict"),
    ],
)
def test_what_may_go_well_later_is_retried(status, code):
    assert why_left(status, code) is None


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (None, "invalid_json_line", "invalid"),
        (None, "line_quarantined", "processes"),
        (503, "request_quarantined", "processes"),
        (400, "context_length_exceeded", "refused"),
        (403, "insufficient_scope", "refused"),
        (404, "model_not_found", "refused"),
    ],
)
def test_what_would_fail_again_is_left_with_the_reason(status, code, why):
    assert why in why_left(status, code)


def test_lines_are_named_by_their_numbers_and_the_others_are_counted():
    found = sort(
        [
            line(7, 500, "x"),
            line(2, None, "batch_expired"),
            *(line(no, 400, "bad") for no in (3, 4)),
            line(9, None, "y"),
        ]
    )
    assert found.retried == {2, 7}
    assert [(one["num_lines"], one["status"], one["code"]) for one in as_value(found)] == [
        (2, 400, "bad"),
        (1, None, "y"),
    ]


def test_an_error_file_that_is_none_is_refused():
    with pytest.raises(msgspec.MsgspecError):
        sort([b"<html>"])


def result(number: int) -> bytes:
    return b'{"id":"batch_req_0a_%d","custom_id":"c"}\n' % number


class Named(io.BytesIO):
    name = "results.jsonl"


@pytest.mark.parametrize(
    ("content", "after", "kept"),
    [
        (b"", None, 0),
        (result(4), "batch_req_0a_4", len(result(4))),
        (result(4) + result(12), "batch_req_0a_12", len(result(4) + result(12))),
        (result(4) + result(12)[:20], "batch_req_0a_4", len(result(4))),
        (result(12)[:20], None, 0),
    ],
)
def test_a_file_is_continued_after_its_last_whole_line(content, after, kept):
    file = Named(content)
    assert last_line(file, "batch_0a") == after
    assert file.getvalue() == content[:kept]


@pytest.mark.parametrize(
    "content",
    [
        b"my thesis\n",
        b"my thesis",
        result(1) + b"my thesis",
        result(1)[:30] + b"\n",
        b"{}\n",
        result(1).replace(b"0a", b"0b"),
    ],
)
def test_a_file_with_something_else_stays_as_it_is(content):
    file = Named(content)
    with pytest.raises(ApiFailed, match=r"results\.jsonl has something other than results of batch_0a"):
        last_line(file, "batch_0a")
    assert file.getvalue() == content


def test_a_file_of_results_belongs_to_one_command_at_a_time(tmp_path):
    """Two that followed a batch into one file wrote every line twice."""
    path = tmp_path / "results.jsonl"
    with to_go_on_with(path), pytest.raises(ApiFailed, match="Another command writes to"):
        to_go_on_with(path)
    to_go_on_with(path).close()


def test_a_device_is_written_into_and_not_read_to_its_end():
    """/dev/zero has none, and a pipe cannot be read again."""
    with to_go_on_with(Path("/dev/zero")) as file:
        assert not file.readable()
        file.write(b"a line")
