"""Calls about batches that carry files: an upload, the lines of a file, and results that are followed until the batch ends.

A connection that breaks while results are followed costs nothing: the id of the last line says where the next call goes
on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import aiohttp
import msgspec

from accounting.values.types import ENDED_BATCH
from gateway.cli.answers import warn
from gateway.cli.api import ApiFailed, NotThere, TenantApi, check_is_headgate, distrusted, refusal, segment, silent

ANSWER_S = 300.0
"""The longest time without a byte: a large file is uploaded, and counted for up to 20 seconds."""
WAIT_S = 25
"""The time that the server may wait for news. Proxies give up answers that take a minute."""
MOST_FAILURES = 8
"""The number of calls in a row that may fail while results are followed."""
LONGEST_PAUSE_S = 15.0
STATUS = "x-headgate-batch-status"


class _Result(msgspec.Struct):
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

    def __init__(self, failed: ApiFailed, pause_s: float | None = None) -> None:
        super().__init__(str(failed))
        self.failed = failed
        self.pause_s = pause_s


class BatchCalls:
    """The calls, with a tenant's key."""

    def __init__(self, api: TenantApi, session: aiohttp.ClientSession) -> None:
        self._url, self._base = api.url, api.server.base
        self._session = session

    @classmethod
    @asynccontextmanager
    async def of(cls, api: TenantApi) -> AsyncIterator[BatchCalls]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=ANSWER_S)
        headers = {"authorization": f"Bearer {api.key}"}
        connector = api.server.connector()
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            yield cls(api, session)

    async def call(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        """Returns the answer's JSON object. Raises `ApiFailed`."""
        try:
            async with self._session.request(method, self._base + path, **how) as answer:
                check_is_headgate(self._url, answer)
                content = await answer.read()
                if answer.status != 200:
                    raise refusal(self._url, answer.status, content)
                return msgspec.json.decode(content, type=dict[str, Any])
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise self._silent(error) from None

    async def upload(self, file: BinaryIO, name: str, expires_after_s: int | None = None) -> str:
        """Uploads the input of a batch. Returns the file's id. Raises `ApiFailed`."""
        form = aiohttp.FormData({"purpose": "batch"})
        if expires_after_s is not None:
            form.add_field("expires_after[anchor]", "created_at")
            form.add_field("expires_after[seconds]", str(expires_after_s))
        form.add_field("file", file, filename=name, content_type="application/jsonl")
        return str((await self.call("POST", "/v1/files", data=form))["id"])

    async def create(self, file: BinaryIO, name: str, batch: dict[str, Any]) -> dict[str, Any]:
        """Uploads a file and makes a batch of it. A file of which no batch came is deleted. Raises `ApiFailed`."""
        file_id = await self.upload(file, name)
        try:
            body = {"input_file_id": file_id, "completion_window": "24h", **batch}
            return await self.call("POST", "/v1/batches", json=body)
        except ApiFailed:
            await self.call("DELETE", f"/v1/files/{file_id}")
            raise

    async def file_lines(self, file_id: str, what: str) -> AsyncIterator[bytes]:
        """Yields the lines of a file, without their ends. Raises `ApiFailed`."""
        try:
            async with self._session.get(f"{self._base}/v1/files/{segment(file_id)}/content") as answer:
                check_is_headgate(self._url, answer)
                if answer.status != 200:
                    raise refusal(self._url, answer.status, await answer.read())
                async for line in _lines(answer.content):
                    yield line
        except NotThere:
            raise ApiFailed(f"{what} of the batch is not there any more: it was deleted, or has expired.") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._silent(error) from None

    async def follow(self, batch_id: str, found: Followed, write: Callable[[bytes], None], *, until_end: bool) -> None:
        """Gives each line of the results to `write`, and notes in `found` how far it came. Raises `ApiFailed`."""
        num_failures = 0
        while True:
            began, num_before = time.monotonic(), found.num_lines
            try:
                async for line in self._results(batch_id, found, WAIT_S if until_end else 0):
                    write(line + b"\n")
                    found.after = msgspec.json.decode(line, type=_Result).id
                    found.num_lines += 1
                    num_failures = 0
            except _Broken as broken:
                num_failures += 1
                if num_failures > MOST_FAILURES:
                    raise broken.failed from None
                if num_failures == 2:
                    warn(f"{broken} It is asked again.")
                await asyncio.sleep(broken.pause_s or min(LONGEST_PAUSE_S, 0.5 * 2**num_failures))
                continue
            if found.status in ENDED_BATCH or not until_end:
                return
            if found.num_lines == num_before and time.monotonic() - began < 1:
                await asyncio.sleep(1)  # a server that stops waits for nothing

    async def _results(self, batch_id: str, found: Followed, wait_s: int) -> AsyncIterator[bytes]:
        """Yields the lines of one answer. Raises `_Broken` and `ApiFailed`."""
        params = {"wait": str(wait_s)} | ({} if found.after is None else {"after": found.after})
        try:
            async with self._session.get(
                f"{self._base}/v1/batches/{segment(batch_id)}/results", params=params
            ) as answer:
                check_is_headgate(self._url, answer)
                if answer.status != 200:
                    failed = refusal(self._url, answer.status, await answer.read())
                    if answer.status in (429, 503):
                        raise _Broken(failed, float(answer.headers.get("retry-after", 1)))
                    raise failed
                found.status = answer.headers.get(STATUS, "")
                async for line in _lines(answer.content):
                    yield line
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Broken(self._silent(error)) from None

    def _silent(self, error: Exception) -> ApiFailed:
        return distrusted(self._url, error) or silent(self._url, str(error) or type(error).__name__)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields whole lines, without their ends. What comes after the last end is a line, too."""
    rest = bytearray()
    async for piece in content.iter_any():
        rest += piece
        if b"\n" in piece:
            *whole, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in whole:
                yield line
    if rest:
        yield bytes(rest)
