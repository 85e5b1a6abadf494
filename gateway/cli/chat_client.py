"""One streamed chat completion over HTTP, with a tenant's key: its pieces, and the facts of its last event."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from accounting.values.tenant_types import Credentials
from gateway.base.home import Home
from gateway.cli.api import AdminApi, ApiFailed, check_is_headgate, refusal, silent

SILENT_S = 600.0
"""The longest time between two pieces of an answer."""


class Answer(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    ttft_s: float | None = None
    """The time from the call to the first text."""
    tokens_per_s: float | None = None
    """The pace after the first token."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    charge_micro_units: int | None = None
    currency: str = ""
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatClient:
    url: str
    key: str

    @classmethod
    def of(cls, home: Path) -> ChatClient:
        """Raises ApiFailed."""
        return cls(AdminApi(home).url, _key(Home(home)))

    def first_model(self) -> str:
        """Raises ApiFailed."""
        models = asyncio.run(self._models())
        if not models:
            raise ApiFailed("This key may use no model that is served: `headgate tenants` and `keys` say which it may.")
        return models[0]

    async def _models(self) -> list[str]:
        async with self._session() as session:
            try:
                async with session.get(f"{self.url}/v1/models") as answer:
                    check_is_headgate(self.url, answer)
                    content = await answer.read()
                    if answer.status != 200:
                        raise refusal(self.url, answer.status, content)
                return [str(one["id"]) for one in msgspec.json.decode(content)["data"]]
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
                raise silent(self.url, str(error) or type(error).__name__) from None

    async def stream(self, body: dict[str, Any], show: Callable[[str], None]) -> Answer:
        """Calls `show` with each piece as it comes, and returns the whole. Raises ApiFailed."""
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        answer, began, first = Answer(), time.monotonic(), None
        async with self._session() as session:
            try:
                async for event in self._events(session, whole):
                    piece = _take(event, answer)
                    if piece and first is None:
                        first = time.monotonic()
                        answer.ttft_s = round(first - began, 4)
                    if piece:
                        answer.text += piece
                        show(piece)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise silent(self.url, str(error) or type(error).__name__) from None
        took_s = time.monotonic() - (first or began)
        if first is not None and answer.completion_tokens > 1 and took_s > 0:
            answer.tokens_per_s = round((answer.completion_tokens - 1) / took_s, 2)
        return answer

    async def _events(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            check_is_headgate(self.url, answer)
            if answer.status == 404:
                served = ", ".join(await self._models()) or "none"
                raise ApiFailed(f"No model {body['model']!r} is served to this key. Served are: {served}.")
            if answer.status != 200:
                raise refusal(self.url, answer.status, await answer.read())
            async for line in answer.content:
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                try:
                    event = msgspec.json.decode(data, type=dict[str, Any])
                except msgspec.DecodeError:
                    raise ApiFailed(f"{self.url} sent something other than the events of a chat.") from None
                if "error" in event:
                    raise refusal(self.url, 200, data)
                yield event

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENT_S)
        return aiohttp.ClientSession(headers={"authorization": f"Bearer {self.key}"}, timeout=timeout)


def _take(event: dict[str, Any], answer: Answer) -> str:
    """Notes an event's facts, and returns its text."""
    usage, own = event.get("usage"), event.get("headgate")
    if usage:
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if own:
        answer.charge_micro_units, answer.currency = own.get("charge_micro_units"), own.get("currency", "").upper()
        answer.request_id = own.get("request_id")
    choices = event.get("choices") or []
    if not choices:
        return ""
    answer.finish_reason = choices[0].get("finish_reason") or answer.finish_reason
    delta = choices[0].get("delta") or {}
    return str(delta.get("reasoning_content") or "") + str(delta.get("content") or "")


def _key(home: Home) -> str:
    given = os.environ.get("HEADGATE_API_KEY", "")
    if given and not given.startswith("hg_admin_"):
        return given
    try:
        return msgspec.json.decode(home.credentials.read_bytes(), type=Credentials).api_key
    except (OSError, msgspec.MsgspecError):
        raise ApiFailed(
            f"There is no tenant's key: set HEADGATE_API_KEY to one, or use a home with {home.credentials.name}."
            " An admin key runs no inference."
        ) from None
