"""One batch line over HTTP, and the meaning of its answer. The module knows the gateway's answers, but no SQL, no order
of lines and no concurrency."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from accounting.requests.idempotency_store import line_key
from accounting.values.types import Usage
from workers.jobs.base.tracing import ChunkTrace

NOT_READY = frozenset({409, 429, 503})
"""Answers that with Retry-After are back-pressure, and never a failure of the line."""
RETRIED = frozenset({408})
REFUSED_BATCH = frozenset({"project_archived", "tenant_suspended"})
MAX_WAIT_S = 60.0
UNREACHED_WAIT_S = 1.0


class Answered(msgspec.Struct, frozen=True):
    """The gateway's final answer to the line: an output line or an error line."""

    status: int
    request_id: str | None
    body: bytes
    usage: Usage = Usage()
    code: str | None = None
    message: str = ""


class Later(msgspec.Struct, frozen=True):
    """Back-pressure. It is not caused by the line and not counted."""

    wait_s: float
    busy: bool
    """The gateway is busy. With False only this line must wait, as its key is running."""


class Failed(msgspec.Struct, frozen=True):
    """A failure that is counted. The third one ends the line."""

    code: str
    message: str
    answer: Answered | None = None


class Stopped(msgspec.Struct, frozen=True):
    """The batch as a whole is refused. `paused_reason` is a budget or a suspension; it is None if the credential is not
    valid any more."""

    paused_reason: str | None


class Closed(msgspec.Struct, frozen=True):
    """The line has ended elsewhere, so there is nothing to write."""


Outcome = Answered | Later | Failed | Stopped | Closed


class Sender:
    """Sends the lines of one chunk, with the connections and credential of its batch, in the chunk's trace."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, credential: str, batch_id: str, trace: ChunkTrace
    ) -> None:
        self._session = session
        self._url = url
        self._batch_id = batch_id
        self._trace = trace
        self._headers = {"authorization": f"Bearer {credential}", "content-type": "application/json", **trace.headers}

    async def send(self, line_no: int, body: bytes) -> Outcome:
        headers = {**self._headers, "idempotency-key": line_key(self._batch_id, line_no)}
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                self._trace.answered(line_no, response.status, response.headers)
                content = await response.read()
                return judge(response.status, response.headers, content)
        except aiohttp.ClientConnectorError:
            # The line did not reach a gateway. One that restarts must not cost the line one of its three tries.
            return Later(UNREACHED_WAIT_S, busy=True)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Failed("connection_lost", f"The gateway did not answer: {type(error).__name__}.")


def judge(status: int, headers: Any, content: bytes) -> Outcome:
    """Returns the outcome. The function is total: every answer has a meaning."""
    request_id = headers.get("x-request-id")
    if 200 <= status < 300:
        return _good(status, request_id, content)
    code, message = _error_of(content, status)
    refused = Answered(status, request_id, _json_or_null(content), code=code, message=message)
    if status == 401:
        return Stopped(None)
    if status == 403 and code in REFUSED_BATCH:
        return Stopped(code if code == "tenant_suspended" else None)
    if status == 429 and code == "insufficient_quota":
        return Stopped(code)
    if code == "batch_line_ended":
        return Closed()
    wait_s = _retry_after(headers)
    if status in NOT_READY and wait_s is not None:
        return Later(min(wait_s, MAX_WAIT_S), busy=status != 409)
    if headers.get("x-should-retry") == "false":
        return refused
    if status >= 500 or status in RETRIED or status in NOT_READY:
        return Failed(code, message, refused)
    return refused


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    cache_write_tokens: int | None = 0


class _Usage(msgspec.Struct):
    """The usage of an answer: of chat or of Responses, whose prompt includes what was read from the cache and written to
    it, or of Messages, where the three counts of the prompt are disjoint."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens: int = 0
    input_tokens_details: _Details | None = None
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0

    def counted(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details or _Details()
        cached, written = details.cached_tokens or 0, details.cache_write_tokens or 0
        return Usage(
            cache_read=cached + self.cache_read_input_tokens,
            cache_write=written + self.cache_creation_input_tokens,
            uncached=self.prompt_tokens + self.input_tokens - cached - written,
            output=self.completion_tokens + self.output_tokens,
        )


class _Extension(msgspec.Struct):
    request_id: str | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None
    headgate: _Extension | None = None


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""
    type: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


def _good(status: int, request_id: str | None, content: bytes) -> Outcome:
    try:
        reply = msgspec.json.decode(content, type=_Reply)
    except msgspec.MsgspecError:
        return Failed("invalid_answer", "The gateway's answer is no JSON object of ours.")
    usage = (reply.usage or _Usage()).counted()
    # A replayed answer names the request that ran; the header names the one that asked for it.
    ran = reply.headgate and reply.headgate.request_id
    return Answered(status, ran or request_id, _json_or_null(content), usage)


def _error_of(content: bytes, status: int) -> tuple[str, str]:
    try:
        error = msgspec.json.decode(content, type=_Refusal).error
    except msgspec.MsgspecError:
        return f"http_{status}", "The gateway gave no reason."
    return error.code or error.type or f"http_{status}", error.message


def _json_or_null(content: bytes) -> bytes:
    """Returns JSON for a result line, or null: a proxy before the gateway may have answered in HTML."""
    try:
        return msgspec.json.format(content, indent=-1)
    except msgspec.MsgspecError:
        return b"null"


def _retry_after(headers: Any) -> float | None:
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) / scale)
        except (KeyError, ValueError):
            continue
    return None
