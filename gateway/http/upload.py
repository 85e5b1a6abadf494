"""A multipart upload, streamed into the file store: one file and a few small fields, in any order, within limits.

The client's file name is metadata; the bytes get a random name. The caller finishes or aborts the writer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from accounting.batches import files
from accounting.batches.file_store import Writer
from gateway.base import errors
from gateway.base.app_keys import SETTINGS
from gateway.http import body
from gateway.http.auth import PRINCIPAL

MAX_PARTS = 16
MAX_LINES = 1024
"""The most lines of an upload outside of its parts' bytes: boundaries, heads, and what precedes the first boundary."""
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 512
READ_BYTES = 64 * 1024
WRITE_BYTES = 512 * 1024
"""The number of bytes that a thread encrypts and writes at a time."""
AS_THEY_ARE = frozenset({"binary", "8bit", "7bit"})
"""The transfer encodings that change no byte. Some clients name one for each file, and RFC 7578 has none."""

T = TypeVar("T")

UNENDED = web.AppKey("unended_uploads", Counter[str])
"""The bytes that uploads count which have not ended, by tenant. They are in no quota of SQL yet."""


class _FewLines:
    """The bytes of a request, with few lines. aiohttp skips the lines before the first boundary one by one, without a
    pause: a megabyte of them would hold the loop for a second.
    """

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._num_left = MAX_LINES

    async def readline(self, **limits: int) -> bytes:
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError("more lines than an upload has")
        return await self._content.readline(**limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)


@dataclass
class Upload:
    name: str = ""
    """The client's file name, made storable; "" means that there is no file."""
    fields: dict[str, str] = field(default_factory=dict)


class Receiver:
    """One upload. `limits` maps a purpose to its most bytes. Until the purpose is known, the largest limit holds.
    `room` is the number of bytes that the tenant's disk quota leaves to all its uploads that have not ended.
    """

    def __init__(self, request: web.Request, writer: Writer, limits: Mapping[str, int], room: int) -> None:
        self._request = request
        self._writer = writer
        self._limits = limits
        self._room = room
        self._upload = Upload()
        self._unended = request.app[UNENDED]
        self._tenant_id = request[PRINCIPAL].tenant_id
        self._num_read = self._num_counted = 0
        self._count(files.LEAST_BYTES)
        self._body_s = request.app[SETTINGS].body_s
        self._started = asyncio.get_running_loop().time()

    async def receive(self) -> Upload:
        """Reads the upload. Raises `ApiError`: 415, 413, 408, 400."""
        if self._request.content_type != "multipart/form-data":
            raise errors.ApiError(415, "The body must be multipart/form-data.", code="unsupported_media_type")
        await body.send_continue(self._request)
        try:
            await self._read_parts()
        # aiohttp reports a missing boundary, broken part headers and a cut body in these four ways.
        except (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError) as error:
            raise errors.invalid("The body is not valid multipart/form-data.") from error
        if not self._upload.name:
            raise errors.invalid("Missing required parameter: 'file'.", "file", "missing_required_parameter")
        self._check_size()
        return self._upload

    async def _read_parts(self) -> None:
        reader = MultipartReader(self._request.headers, cast(StreamReader, _FewLines(self._request.content)))
        for _ in range(MAX_PARTS):
            part = await self._timed(reader.next())
            if part is None:
                return
            if not isinstance(part, BodyPartReader) or not part.name:
                raise ValueError("a part without a name, or parts within a part")
            transfer = part.headers.get("content-transfer-encoding", "binary").strip().lower()
            if "content-encoding" in part.headers or transfer not in AS_THEY_ARE:
                raise errors.invalid("An encoded part is not supported.")
            if part.name == "file":
                await self._take_file(part)
            else:
                await self._take_field(part)
        raise errors.invalid("The upload has too many parts.")

    async def _take_file(self, part: BodyPartReader) -> None:
        if self._upload.name:
            raise errors.invalid("Exactly one file can be uploaded.", "file")
        self._upload.name = storable(part.filename or "upload")
        waiting = bytearray()
        while chunk := await self._timed(part.read_chunk(READ_BYTES)):
            waiting += chunk
            self._num_read += len(chunk)
            self._count(max(self._num_read, files.LEAST_BYTES))
            self._check_size(len(waiting))
            if len(waiting) >= WRITE_BYTES:
                await asyncio.to_thread(self._writer.write, bytes(waiting))
                waiting.clear()
        await asyncio.to_thread(self._writer.write, bytes(waiting))

    async def _take_field(self, part: BodyPartReader) -> None:
        name, value = part.name or "", bytearray()
        while chunk := await self._timed(part.read_chunk(MAX_FIELD_BYTES)):
            value += chunk
            if len(value) > MAX_FIELD_BYTES:
                raise errors.too_large("A field of the upload is too large.")
        if name in self._upload.fields:
            raise errors.invalid("A field of the upload was given more than once.")
        self._upload.fields[name] = value.decode()

    def _check_size(self, num_waiting: int = 0) -> None:
        num_bytes = self._writer.num_bytes + num_waiting
        purpose = self._upload.fields.get("purpose")
        most = self._limits.get(purpose or "", max(self._limits.values()))
        if num_bytes > most:
            raise errors.too_large("The file is too large for its purpose.")
        if self._unended[self._tenant_id] > self._room:
            raise errors.too_large("The files of your project take up all of their space.")

    def _count(self, num_bytes: int) -> None:
        self._unended[self._tenant_id] += num_bytes - self._num_counted
        self._num_counted = num_bytes

    def end(self) -> None:
        """Gives back the room of this upload: its file is registered, or gone. Call it once."""
        self._count(0)
        if not self._unended[self._tenant_id]:
            del self._unended[self._tenant_id]

    async def _timed(self, reading: Awaitable[T]) -> T:
        """Bounds the time of all pieces so far, so that a client that sends too slowly is refused."""
        try:
            async with asyncio.timeout_at(self._started + max(self._body_s, self._num_read / body.MIN_BYTES_PER_S)):
                return await reading
        except TimeoutError:
            raise errors.timeout("The request body did not arrive in time.") from None


def storable(name: str) -> str:
    """Returns a client's file name as text that SQL and JSON can hold; it never becomes a path."""
    text = name.encode("utf-8", "replace").decode().replace("\0", "�")
    return text[:MAX_NAME_CHARS]
