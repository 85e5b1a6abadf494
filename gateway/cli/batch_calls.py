"""Calls about batches that carry files: an upload, the lines of a file, and results that are followed until the batch ends.

A connection that breaks while results are followed costs nothing: the id of the last line says where the next call goes
on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import aiohttp
import msgspec

from accounting.values.types import ENDED_BATCH
from gateway.cli.answers import warn
from gateway.cli.api import (
    ApiFailed,
    NotReached,
    NotThere,
    TenantApi,
    check_is_headgate,
    distrusted,
    refusal,
    segment,
    silent,
)

ANSWER_S = 300.0
"""The longest time without a byte: a large file is uploaded, and counted for up to 20 seconds."""
WAIT_S = 25
"""The time that the server may wait for news. Proxies give up answers that take a minute."""
MOST_FAILURES = 8
"""The number of calls in a row that may fail while results are followed."""
LONGEST_PAUSE_S = 15.0
PLAIN_PAUSE_S = 5.0
"""The pause after a read that could not wait for news, because the server had no place for it."""
MOST_TOLD_S = 60.0
"""The longest pause that a server may ask for."""
RETRY_OF = "retry_of"
"""The entry of a batch's metadata that names the batch whose failed lines it runs again."""
STATUS = "x-headgate-batch-status"


class Result(msgspec.Struct):
    """The part of a result that is read: its id, after which a reader goes on."""

    id: str


@dataclass
class Followed:
    """How far results were followed."""

    after: str | None
    """The id of the last line."""
    num_lines: int = 0
    status: str = ""


class _Broken(Exception):
    """The connection broke, or the server asks to come later."""

    def __init__(self, failed: ApiFailed, pause_s: float | None = None, *, is_full: bool = False) -> None:
        super().__init__(str(failed))
        self.failed = failed
        self.pause_s = pause_s
        self.is_full = is_full
        """Whether the server has no place for the request."""


class BatchCalls:
    """The calls, with a tenant's key."""

    def __init__(self, api: TenantApi, session: aiohttp.ClientSession) -> None:
        self._url, self._base = api.url, api.server.base
        self._session = session

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, api: TenantApi) -> AsyncIterator[BatchCalls]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=ANSWER_S)
        headers = {"authorization": f"Bearer {api.key}"}
        connector = api.server.connector()
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            yield cls(api, session)

    async def call(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        """Returns the answer's JSON object. Raises `ApiFailed`."""
        try:
            return await self._call(method, path, **how)
        except _Broken as broken:
            raise broken.failed from None

    async def _call(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        """Returns the answer's JSON object. Raises `ApiFailed` for a refusal, and `_Broken` where it is not known what
        became of the request."""
        try:
            async with self._session.request(method, self._base + path, **how) as answer:
                check_is_headgate(self._url, answer)
                content = await answer.read()
                if answer.status != 200:
                    failed = refusal(self._url, answer.status, content)
                    raise _Broken(failed) if answer.status >= 500 else failed
                return msgspec.json.decode(content, type=dict[str, Any])
        except NotReached as failed:
            raise _Broken(failed) from None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise _Broken(self._silent(error)) from None

    async def upload(self, file: BinaryIO, name: str, expires_after_s: int | None = None) -> str:
        """Uploads the input of a batch. Returns the file's id. Raises `ApiFailed`."""
        form = aiohttp.FormData({"purpose": "batch"})
        if expires_after_s is not None:
            form.add_field("expires_after[anchor]", "created_at")
            form.add_field("expires_after[seconds]", str(expires_after_s))
        form.add_field("file", file, filename=name, content_type="application/jsonl")
        return str((await self.call("POST", "/v1/files", data=form))["id"])

    async def create(
        self, file: BinaryIO, name: str, batch: dict[str, Any], idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """Uploads a file and makes one batch of it, also where an answer is lost on the way. A file of which a batch is
        refused is deleted. Raises `ApiFailed`."""
        file_id = await self.upload(file, name)
        body = {"input_file_id": file_id, "completion_window": "24h", **batch}
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        try:
            try:
                return await self._call("POST", "/v1/batches", json=body, headers=headers)
            except _Broken:
                await asyncio.sleep(1)
                return await self._call("POST", "/v1/batches", json=body, headers=headers)
        except _Broken as broken:
            raise ApiFailed(
                f"{broken} It is not known whether the batch was made of {file_id}: see `headgate batches list` before"
                " you submit it again."
            ) from None
        except ApiFailed:
            with contextlib.suppress(ApiFailed):
                await self.call("DELETE", f"/v1/files/{file_id}")
            raise

    async def newest_retry(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the newest batch that says in its metadata that it retries `batch`. Raises `ApiFailed`."""
        params: dict[str, Any] = {"limit": 100}
        while True:
            page = await self.call("GET", "/v1/batches", params=params)
            for one in page["data"]:
                if one["created_at"] < batch["created_at"]:
                    return None
                if (one["metadata"] or {}).get(RETRY_OF) == batch["id"]:
                    return dict(one)
            if not page["has_more"]:
                return None
            params["after"] = page["last_id"]

    async def file_lines(self, file_id: str, what: str) -> AsyncIterator[bytes]:
        """Yields the lines of a file, without their ends. Raises `ApiFailed`."""
        try:
            async with self._session.get(f"{self._base}/v1/files/{segment(file_id)}/content") as answer:
                check_is_headgate(self._url, answer)
                if answer.status != 200:
                    raise refusal(self._url, answer.status, await answer.read())
                async for line in _lines(answer.content):
                    yield line.removesuffix(b"\n")
        except NotThere:
            raise ApiFailed(f"{what} of the batch is not there any more: it was deleted, or has expired.") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._silent(error) from None

    async def follow(self, batch_id: str, found: Followed, write: Callable[[bytes], None], *, until_end: bool) -> None:
        """Gives each line of the results to `write`, and notes in `found` how far it came. Raises `ApiFailed`."""
        num_failures = 0
        wait_s = longest_s = WAIT_S if until_end else 0
        while True:
            began, num_before = time.monotonic(), found.num_lines
            try:
                async for line_id, line in self._results(batch_id, found, wait_s):
                    write(line)
                    found.after = line_id
                    found.num_lines += 1
                    num_failures = 0
            except _Broken as broken:
                if broken.is_full and wait_s:
                    wait_s = 0
                    await asyncio.sleep(broken.pause_s or 1)
                    continue
                num_failures += 1
                if num_failures > MOST_FAILURES:
                    raise broken.failed from None
                if num_failures == 2:
                    warn(f"{broken} It is asked again.")
                await asyncio.sleep(broken.pause_s or min(LONGEST_PAUSE_S, 0.5 * 2**num_failures))
                continue
            num_failures = 0
            if found.status in ENDED_BATCH or not until_end:
                return
            if not wait_s:
                await asyncio.sleep(PLAIN_PAUSE_S)
            elif found.num_lines == num_before and time.monotonic() - began < 1:
                await asyncio.sleep(1)  # a server that stops waits for nothing
            wait_s = longest_s

    async def _results(self, batch_id: str, found: Followed, wait_s: int) -> AsyncIterator[tuple[str, bytes]]:
        """Yields the id and the whole line of each result of one answer. Raises `_Broken` and `ApiFailed`."""
        params = {"wait": str(wait_s)} | ({} if found.after is None else {"after": found.after})
        try:
            async with self._session.get(
                f"{self._base}/v1/batches/{segment(batch_id)}/results", params=params
            ) as answer:
                check_is_headgate(self._url, answer)
                if answer.status != 200:
                    failed = refusal(self._url, answer.status, await answer.read())
                    if answer.status in (429, 503):
                        pause_s = _pause_s(answer.headers.get("retry-after", ""))
                        raise _Broken(failed, pause_s, is_full=answer.status == 429)
                    raise failed
                found.status = answer.headers.get(STATUS, "")
                async for line in _lines(answer.content):
                    yield self._line_id(line), line
        except NotReached as failed:
            raise _Broken(failed) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Broken(self._silent(error)) from None

    def _line_id(self, line: bytes) -> str:
        """Returns the id of a result. Raises `_Broken` for a line that has no end, or is no result."""
        try:
            if line.endswith(b"\n"):
                return msgspec.json.decode(line, type=Result).id
        except msgspec.MsgspecError:
            pass
        raise _Broken(ApiFailed(f"An answer of {self._url} broke off in a line, or has one that is no result."))

    def _silent(self, error: Exception) -> ApiFailed:
        return distrusted(self._url, error) or silent(self._url, str(error) or type(error).__name__)


def _pause_s(told: str) -> float | None:
    """Returns the seconds of a Retry-After header, bounded. None stands for a date, and for anything else."""
    try:
        pause_s = float(told)
    except ValueError:
        return None
    return min(pause_s, MOST_TOLD_S) if math.isfinite(pause_s) and pause_s >= 0 else None


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields lines with their ends. What comes after the last end is a line without one."""
    rest = bytearray()
    async for piece in content.iter_any():
        rest += piece
        if b"\n" in piece:
            *whole, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in whole:
                yield line + b"\n"
    if rest:
        yield bytes(rest)
