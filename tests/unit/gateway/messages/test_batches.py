"""Message Batches: bodies become lines, and lines become results."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from batch_infos import batch_info
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.base.errors import ApiError
from gateway.intake.json_body import decode_object
from gateway.messages.batches import batch_object, encoded, fingerprint, in_chunks, lines_of, read, result, unrun_result


def request(custom_id: str = "a", **params: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": {"model": "m", "max_tokens": 1, "messages": []} | params}


def body(*requests: Any) -> bytes:
    return msgspec.json.encode({"requests": list(requests)})


def lines_in(text: bytes) -> list[bytes]:
    """The lines of the input file."""
    return b"".join(encoded(read(decode_object(text))[1])).splitlines()


def test_each_request_is_a_line() -> None:
    pretty = msgspec.json.format(body(request("a"), request("b", system="x\ny")), indent=2)
    assert read(decode_object(pretty))[0] == "m"
    first, second = map(msgspec.json.decode, lines_in(pretty))
    assert first == {"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": request("a")["params"]}
    assert second["body"]["system"] == "x\ny"


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (body(), "requests"),
        (body(1), "requests[0]"),
        (body(request("a"), {"custom_id": "b"}), "requests[1].params"),
        (b"{", None),
        (b"[" * 100_000, None),
        (body(request("a b")), "requests[0].custom_id"),
        (body(request("a"), request("a")), "requests[1].custom_id"),
        (body(request("a"), request("b", model="n")), "requests[1].params.model"),
        (body({"custom_id": "a", "params": {"max_tokens": 1}}), "requests[0].params.model"),
        (body({"custom_id": "a", "params": []}), "requests[0].params"),
        (body({"custom_id": "a"}), "requests[0].params"),
    ],
)
def test_faults(bad: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as raised:
        read(decode_object(bad))
    assert raised.value.status == 400
    assert (raised.value.param or None) == param


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("validating", "in_progress"),
        ("in_progress", "in_progress"),
        ("finalizing", "in_progress"),
        ("cancelling", "canceling"),
        ("cancelled", "ended"),
        ("completed", "ended"),
        ("failed", "ended"),
        ("expired", "ended"),
    ],
)
def test_states_and_counts(state: str, status: str) -> None:
    shown = batch_object(batch_info(state, {}), 4, {"succeeded": 1, "errored": 2, "cancelled": 1})
    assert shown["processing_status"] == status
    assert sum(shown["request_counts"].values()) == 4
    assert (shown["results_url"] is not None) == (status == "ended")
    if status != "ended":
        assert shown["request_counts"]["processing"] == 4


def test_moments_are_rfc_3339() -> None:
    shown = batch_object(batch_info("completed", {"completed_at": 1_790_000_060}), 4, {"succeeded": 4})
    assert shown["created_at"] == "2026-09-21T14:13:20Z"
    assert shown["ended_at"] == "2026-09-21T14:14:20Z"


MESSAGE = {"type": "message", "content": []}
REFUSED = {"type": "error", "error": {"type": "invalid_request_error", "message": "No."}, "request_id": "req_1"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"response": {"status_code": 200, "body": MESSAGE}, "error": None}, {"type": "succeeded", "message": MESSAGE}),
        ({"response": None, "error": {"code": "batch_cancelled", "message": ""}}, {"type": "canceled"}),
        ({"response": None, "error": {"code": "batch_expired", "message": ""}}, {"type": "expired"}),
        (
            {"response": {"status_code": 400, "body": REFUSED}, "error": {"code": "invalid_value", "message": "No."}},
            {"type": "errored", "error": REFUSED},
        ),
        (
            {"response": {"status_code": 502, "body": None}, "error": {"code": "http_502", "message": "Why?"}},
            {
                "type": "errored",
                "error": {
                    "type": "error",
                    "error": {"type": "api_error", "message": "Why?", "code": "http_502"},
                    "request_id": None,
                },
            },
        ),
    ],
)
def test_results(line: dict[str, Any], told: dict[str, Any]) -> None:
    raw = msgspec.json.encode({"id": "batch_req_1", "custom_id": "a"} | line)
    assert msgspec.json.decode(result(raw)) == {"custom_id": "a", "result": told}


def test_a_batch_that_ended_before_its_lines_were_read_has_a_result_for_each_request() -> None:
    lines = lines_in(body(request("a"), request("b")))
    faults = [{"code": "backlog_exceeded", "message": "Too much."}]
    told = [msgspec.json.decode(unrun_result(line, "failed", faults)) for line in lines]
    assert [one["custom_id"] for one in told] == ["a", "b"]
    assert told[0]["result"]["error"]["error"]["message"] == "Too much."
    canceled = msgspec.json.decode(unrun_result(lines[0], "cancelled", None))
    assert canceled["result"] == {"type": "canceled"}
    unread = msgspec.structs.replace(batch_info("cancelled", {}), num_total=0)
    assert batch_object(unread, 2, {})["request_counts"]["canceled"] == 2


def test_lines_are_found_however_a_file_is_cut() -> None:
    text = b"one\ntwo\n\nfour"
    for size in range(1, len(text) + 1):
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        assert list(lines_of(parts)) == [b"one", b"two", b"", b"four"]
    assert list(in_chunks([b"x" * 40_000] * 3)) == [b"x" * 80_000, b"x" * 40_000]


PLAIN = body(request("a", model="some-model", messages=[{"role": "user"}]))


def _status(text: bytes) -> int:
    try:
        fingerprint(read(decode_object(text))[1])
        list(map(msgspec.json.decode, lines_in(text)))
    except ApiError as refusal:
        return refusal.status
    return 200


@given(st.integers(0, len(PLAIN)), st.binary(max_size=4))
@example(PLAIN.index(b"some-model") + 3, b"\xcb")
@example(PLAIN.index(b"max_tokens") + 3, b"\xcb")
@example(PLAIN.index(b"role") + 1, b"\xed\xa0\x80")
def test_any_bytes_at_any_place_of_a_body_are_read_or_refused(place: int, planted: bytes) -> None:
    assert _status(PLAIN) == 200
    assert _status(PLAIN[:place] + planted + PLAIN[place:]) in {200, 400}


@pytest.mark.parametrize("depth", [100, 10_000, 200_000])
def test_nesting_is_refused_or_read(depth: int) -> None:
    params = b'{"model": "m", "x": ' + b"[" * depth + b"]" * depth + b"}"
    assert _status(b'{"requests": [{"custom_id": "a", "params": ' + params + b"}]}") in {200, 400}
