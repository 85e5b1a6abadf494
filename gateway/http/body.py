"""Reads a request's body within its limits: size, time, rate. It handles bytes only; `schema` interprets them."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from gateway.base import errors
from gateway.base.app_keys import SETTINGS
from gateway.http.route_table import Route
from gateway.intake.intake import SHARE

MIN_BYTES_PER_S = 1024


class BodyCutShort(web.RequestPayloadError):
    """The client closed its half of the connection before the end of the body."""


class FramingTooLarge(web.RequestPayloadError):
    """The body came in so many small chunks that they are more work than what is in them."""


def check_head(request: web.Request, route: Route) -> None:
    """Checks what is expected (417), the media type (415), then the size (413), from the head alone. Raises
    `ApiError`.
    """
    if request.get(EXPECTS, CONTINUE) != CONTINUE:
        raise errors.ApiError(
            417, "Of Expect only 100-continue is known: leave the header out.", code="expectation_failed"
        )
    if hdrs.CONTENT_ENCODING in request.headers:
        raise errors.ApiError(415, "Content-Encoding is not supported.", code="unsupported_media_type")
    if route.json_body and request.method in {"POST", "PUT", "PATCH"}:
        has_body = request.can_read_body
        if has_body and request.content_type != "application/json":
            raise errors.ApiError(415, "The body must be application/json.", code="unsupported_media_type")
    most = most_bytes(request, route)
    if request.content_length is not None and request.content_length > most:
        raise _too_large(most)


def most_bytes(request: web.Request, route: Route) -> int:
    """Returns the bound on a body. For JSON it is the operator's bound: a longer body is longer than any context."""
    most = request.app[SETTINGS].json_body_bytes if route.json_body else route.max_body_bytes
    return min(most, route.max_body_bytes)


async def read(request: web.Request, max_bytes: int) -> bytes:
    """Reads the whole body. Raises `ApiError`: 413 before more bytes than the limit are held, 429 before more are held
    than the tenant may have, 408 if the body comes too slowly, 400 if its framing is broken or its end is missing.
    """
    share = request[SHARE]
    share.take_up_to(request.content_length or 0)
    await send_continue(request)
    content = request.content
    if content.is_eof() and content.exception() is None:  # all of it came with the head
        whole = content.read_nowait()
        if len(whole) > max_bytes:
            raise _too_large(max_bytes)
        share.take_up_to(len(whole))
        return whole
    loop = asyncio.get_running_loop()
    body_s = request.app[SETTINGS].body_s
    started = loop.time()
    parts = bytearray()
    try:
        async with asyncio.timeout(body_s) as limit:
            while chunk := await request.content.readany():
                parts += chunk
                if len(parts) > max_bytes:
                    raise _too_large(max_bytes)
                share.take_up_to(len(parts))
                # A large body may take longer than body_s, as long as it keeps the rate.
                limit.reschedule(started + max(body_s, len(parts) / MIN_BYTES_PER_S))
    except TimeoutError:
        raise errors.timeout("The request body did not arrive in time.") from None
    except FramingTooLarge:
        raise errors.invalid(
            "The request body comes in too many small chunks: make them 64 bytes and longer, or send a content-length."
        ) from None
    except BodyCutShort:
        raise errors.invalid("The connection was closed before the end of the request body.") from None
    except web.RequestPayloadError:
        raise errors.invalid("The request body is not valid HTTP.") from None
    return bytes(parts)


def _too_large(most: int) -> errors.ApiError:
    return errors.too_large(f"The request body is too large: at most {most:,} bytes are taken.")


async def send_continue(request: web.Request) -> None:
    """Tells a client that waits before sending its body to go on."""
    if request.get(EXPECTS) == CONTINUE:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun


NUM_BODY_BYTES = web.RequestKey("num_body_bytes", int)
"""The length of the JSON body in bytes, as it came."""
IGNORED = web.RequestKey("ignored", list[str])
"""The names of the body's members that an endpoint in another maker's shape does not know."""
EXPECTS = web.RequestKey("expects", str)
"""The client's `Expect`, in small letters. Absent if there is none."""
CONTINUE = "100-continue"
