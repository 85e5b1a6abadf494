"""Calls of this gateway's own API, made in this process for a page.

A call passes the same middleware, scopes and limits as if the key's owner had sent it from the same address, so a page
shows and a form does what the key may, and no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from gateway.http import inner_calls

PASSED_ON = ("x-forwarded-for", hdrs.HOST)
"""The headers of the page's request that a call has too: the API reads the client's address from them."""


class Refused(Exception):
    """The API refused a call: status, message and code as the API gave them."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


async def fetch(
    request: web.Request, key: str, method: str, target: URL, body: Any = None, idempotency_key: str = ""
) -> Any:
    """Calls the API and returns the decoded JSON answer. Raises `Refused`."""
    data = b"" if body is None else msgspec.json.encode(body)
    return decoded(await forward(request, key, method, target, data, "application/json", idempotency_key))


async def or_refused(call: Awaitable[Any]) -> tuple[Any, Refused | None]:
    """Returns the answer of a call, or why there is none: the page shows the rest without it."""
    try:
        return await call, None
    except Refused as refused:
        return None, refused


def decoded(response: web.StreamResponse) -> Any:
    """Returns the JSON of an answer. Raises `Refused`."""
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):
        raise TypeError("the API does not answer with JSON")
    answer: Any = msgspec.json.decode(response.body) if response.body else None
    if response.status >= 400:
        error = answer["error"]
        raise Refused(response.status, error["message"], error.get("code") or "")
    return answer


async def forward(
    request: web.Request, key: str, method: str, target: URL, data: bytes, content_type: str, idempotency_key: str = ""
) -> web.StreamResponse:
    """Calls the API and returns its answer. A streamed answer has gone to the page's own connection already."""
    headers = CIMultiDict((name, value) for name in PASSED_ON for value in request.headers.getall(name, ()))
    headers[hdrs.AUTHORIZATION] = f"Bearer {key}"
    if idempotency_key:
        headers["idempotency-key"] = idempotency_key
    if data:
        headers[hdrs.CONTENT_TYPE] = content_type
    return await inner_calls.call(request, method, target, headers, data, is_page_read=method == "GET")


def query_of(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the pairs of a query; None and empty text are left out, and a list stands for several pairs."""
    several = ((name, value if isinstance(value, list | tuple) else (value,)) for name, value in values.items())
    return [(name, str(one)) for name, each in several for one in each if one is not None and one != ""]
