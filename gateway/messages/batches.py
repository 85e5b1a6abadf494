"""Message Batches: the body that makes one, the object that shows one, and its results. The module is pure.

A Message Batch is an ordinary batch whose lines have the url `/v1/messages`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from accounting.batches.batches import BatchInfo
from accounting.batches.message_batches import ENDPOINT
from accounting.values.types import ENDED_BATCH
from gateway.base import errors
from gateway.intake.fingerprints import fingerprint_of_lines
from gateway.schema.convert import convert

PATH = "/v1/messages/batches"
CHUNK_BYTES = 64 * 1024
Line = dict[str, Any]
"""A line of the input file, as a value."""
_STATUS = {"cancelling": "canceling"} | dict.fromkeys(ENDED_BATCH, "ended")
_COUNTED = {"succeeded": "succeeded", "errored": "errored", "cancelled": "canceled", "expired": "expired"}
_CUT_OFF = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_UNRUN = {"failed": "errored", "cancelled": "canceled", "expired": "expired"}
"""The results of requests whose batch ended before its lines were read."""


class BatchRequest(msgspec.Struct, frozen=True):
    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class NewMessageBatch(msgspec.Struct, frozen=True):
    requests: Annotated[list[BatchRequest], Meta(min_length=1)]


class _Requests(msgspec.Struct):
    """A new batch whose requests are converted one by one: one call over thousands would hold the interpreter lock."""

    requests: Annotated[list[dict[str, Any]], Meta(min_length=1)]


class _Params(msgspec.Struct):
    model: Annotated[str, Meta(min_length=1, max_length=256)]


class _Line(msgspec.Struct):
    """A line of a file of results, or of the input."""

    custom_id: str | None = None
    response: dict[str, msgspec.Raw] | None = None
    error: dict[str, Any] | None = None


def read(body: Mapping[str, Any]) -> tuple[str, list[Line]]:
    """Reads the body of a new batch. Returns (the model of all requests, the lines of the input file). Raises
    `ApiError` 400. What is inside of a request is judged when it runs.
    """
    found = [
        convert(request, BatchRequest, f"requests[{index}]")
        for index, request in enumerate(convert(body, _Requests).requests)
    ]
    models = [convert(one.params, _Params, f"requests[{index}].params").model for index, one in enumerate(found)]
    other = next((index for index, model in enumerate(models) if model != models[0]), None)
    if other is not None:
        where = f"requests[{other}].params.model"
        raise errors.invalid(f"'{where}' must be the model of the first request: a batch runs on one model.", where)
    _check_ids(found)
    return models[0], [_line(request) for request in found]


def fingerprint(lines: Iterable[Line]) -> bytes:
    """Returns what makes two bodies the same one: their requests in order."""
    return fingerprint_of_lines(PATH, lines)


def encoded(lines: Iterable[Line]) -> Iterator[bytes]:
    """Yields the input file of a batch in pieces."""
    return in_chunks(msgspec.json.encode(line) + b"\n" for line in lines)


def _check_ids(requests: Sequence[BatchRequest]) -> None:
    seen: set[str] = set()
    for index, request in enumerate(requests):
        if request.custom_id in seen:
            where = f"requests[{index}].custom_id"
            raise errors.invalid(f"'{where}' has been used before.", where)
        seen.add(request.custom_id)


def _line(request: BatchRequest) -> Line:
    return {"custom_id": request.custom_id, "method": "POST", "url": ENDPOINT, "body": request.params}


def batch_object(batch: BatchInfo, num_requests: int, lines: Mapping[str, int]) -> dict[str, Any]:
    """Returns the batch. `lines` are the numbers of lines by the state in which they ended; they show once the batch has
    ended. A batch that ended before its lines were read has none.
    """
    has_ended = batch.state in ENDED_BATCH
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if not has_ended:
        counts["processing"] = num_requests
    elif batch.num_total:
        counts |= {_COUNTED[state]: number for state, number in lines.items() if state in _COUNTED}
    else:
        counts[_UNRUN[batch.state]] = num_requests
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": _STATUS.get(batch.state, "in_progress"),
        "request_counts": counts,
        "created_at": _moment(batch.created_at),
        "expires_at": _moment(batch.expires_at),
        "ended_at": _moment(batch.at.get(f"{batch.state}_at")) if has_ended else None,
        "cancel_initiated_at": _moment(batch.at["cancelling_at"]),
        "archived_at": None,
        "results_url": f"{PATH}/{batch.id}/results" if has_ended else None,
    }


def _moment(at: int | None) -> str | None:
    return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def result(raw: bytes) -> bytes:
    """Returns the result of one request, from its line in the output file or in the error file."""
    line = msgspec.json.decode(raw, type=_Line)
    error, response = line.error or {}, line.response or {}
    told: dict[str, Any]
    if not line.error:
        told = {"type": "succeeded", "message": response["body"]}
    elif error.get("code") in _CUT_OFF:
        told = {"type": _CUT_OFF[error["code"]]}
    else:
        told = {"type": "errored", "error": _refusal(response.get("body")) or failure(error)}
    return msgspec.json.encode({"custom_id": line.custom_id, "result": told}) + b"\n"


def unrun_result(raw: bytes, state: str, faults: Sequence[Mapping[str, Any]] | None) -> bytes:
    """Returns the result of one request, from its line in the input file, of a batch that ended in this state before its
    lines were read. `faults` are those of a batch that failed.
    """
    told: dict[str, Any] = {"type": _UNRUN[state]}
    if state == "failed":
        told["error"] = failure(faults[0] if faults else {}, "invalid_request_error")
    return msgspec.json.encode({"custom_id": _custom_id(raw), "result": told}) + b"\n"


def _custom_id(raw: bytes) -> str | None:
    return msgspec.json.decode(raw, type=_Line).custom_id


def _refusal(body: msgspec.Raw | None) -> msgspec.Raw | None:
    """Returns the answer's own error if it has Anthropic's shape; a proxy may have answered otherwise."""
    is_own = body is not None and bytes(body).startswith(b'{"type":"error"')
    return body if is_own else None


def failure(error: Mapping[str, Any], kind: str = "api_error") -> dict[str, Any]:
    told = {"type": kind, "message": error.get("message", ""), "code": error.get("code")}
    return {"type": "error", "error": told, "request_id": None}


def lines_of(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines of a file, without their ends."""
    rest = bytearray()
    for part in parts:
        rest += part
        if b"\n" not in part:
            continue
        *whole, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        yield from whole
    if rest:
        yield bytes(rest)


def in_chunks(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the lines joined to pieces of about `CHUNK_BYTES`."""
    chunk = bytearray()
    for line in lines:
        chunk += line
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)
