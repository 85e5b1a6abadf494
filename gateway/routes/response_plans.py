"""Plans of `/v1/responses`, for the route and for runs in the background: what a body refers to is read, and chat plans
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from accounting.responses.stored import MAX_CHAIN, StoredResponse
from gateway.base import errors
from gateway.base.app_keys import SETTINGS
from gateway.generation.reply import AnswerPlan
from gateway.http.auth import PRINCIPAL
from gateway.http.body import NUM_BODY_BYTES
from gateway.intake.intake import SHARE
from gateway.responses import past, store
from gateway.responses.texts import ResponseTexts
from gateway.responses.translation import Translated, echo, translate
from gateway.routes import chat, common
from gateway.schema import responses
from gateway.schema.responses import ResponseFields
from gateway.writers.responses import ResponseWriter

READ_BODIES = 8
"""The most bytes of items that are read for items named by id, as a multiple of the longest body. A response keeps the items
that it was made from, so a conversation of named items has each of them many times.
"""


@dataclass(frozen=True)
class Checked:
    """A body whose own fields are right, with everything that it refers to."""

    value: dict[str, Any]
    fields: ResponseFields
    ignored: Sequence[str]
    texts: ResponseTexts
    before: StoredResponse | None
    """The previous response."""
    translated: Translated
    items: Sequence[Any]
    """The input, with the items that were named by id."""
    history: Sequence[Any]
    """The items of the responses before, the oldest first."""


async def check(request: web.Request, value: dict[str, Any]) -> Checked:
    """Reads a body, and from SQL what it refers to. Raises `ApiError`."""
    fields, ignored = await common.aside(request, responses.read, value)
    texts = ResponseTexts(None)
    if _needs_texts(request, fields):
        texts = await store.texts_of(request)
    num_own = request[NUM_BODY_BYTES]
    items, num_named = await _with_references(request, texts, fields.items)
    rows = await _chain(request, fields, num_own + num_named)
    history = await common.aside(request, past.items_of, texts, rows)
    translated = await common.aside(request, translate, value, fields, items, texts.unseal, history)
    return Checked(value, fields, ignored, texts, rows[-1] if rows else None, translated, items, history)


async def plan_chat(request: web.Request, checked: Checked, line: tuple[str, int] | None = None) -> AnswerPlan:
    """Returns chat's own plan. Its faults have the names of this API."""
    try:
        return await chat.plan(request, checked.translated.body, line)
    except errors.ApiError as fault:
        raise checked.translated.told(fault) from None


def _needs_texts(request: web.Request, fields: ResponseFields) -> bool:
    if stores(request, fields) or fields.wants_encrypted_reasoning or fields.previous_response_id is not None:
        return True
    sealed = (item for item in fields.items if isinstance(item, dict))
    return any(item.get("encrypted_content") or item.get("type") == "item_reference" for item in sealed)


def stores(request: web.Request, fields: ResponseFields) -> bool:
    """Decides whether the response is stored. Raises `ApiError` 400."""
    may = request[PRINCIPAL].stores_responses
    for name in ("store", "background"):
        if getattr(fields, name) and not may:
            raise errors.invalid("Responses are not stored for this project.", name, "unsupported_parameter")
    return may if fields.store is None else fields.store


async def _chain(request: web.Request, fields: ResponseFields, num_items_bytes: int) -> list[StoredResponse]:
    """Returns the responses that this one goes on from; their items count as bytes of the body from here on.
    `num_items_bytes` are those of the body and of the items that it names by id.
    """
    if fields.previous_response_id is None:
        return []
    request[NUM_BODY_BYTES] += await store.chain_bytes(request, fields.previous_response_id)
    request[SHARE].take_up_to(request[NUM_BODY_BYTES])  # before they are read
    rows = await store.chain(request, fields.previous_response_id)
    past.check_chain(rows, MAX_CHAIN, request.app[SETTINGS].json_body_bytes, num_items_bytes)
    return rows


async def _with_references(
    request: web.Request, texts: ResponseTexts, items: Sequence[Any]
) -> tuple[Sequence[Any], int]:
    """Returns the items with those that are named by id in their places, and the bytes of the named ones."""
    wanted = past.referenced(items)
    if not wanted:
        return items, 0
    most, response_ids = request.app[SETTINGS].json_body_bytes, set(wanted.values())
    num_bytes = await store.own_bytes(request, response_ids)
    if num_bytes > READ_BODIES * most:
        raise past.too_many_bytes(READ_BODIES * most)
    request[NUM_BODY_BYTES] += num_bytes
    request[SHARE].take_up_to(request[NUM_BODY_BYTES])  # before they are read
    rows = await store.several(request, response_ids)

    def resolved() -> tuple[list[Any], int]:
        known: dict[str, Any] = {}
        for row in rows:  # one at a time, because most of what is read may not be wanted
            known |= {item["id"]: item for item in past.items_of(texts, [row]) if item["id"] in wanted}
        return past.resolved(items, known, most)

    return await common.aside(request, resolved)


def _effective(made: AnswerPlan) -> dict[str, Any]:
    """Returns the sampling values that a Response object tells, as they are in force."""
    sampling = made.orders[0].sampling
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    return {name: getattr(sampling, name) for name in names}


def writer_of(
    checked: Checked, made: AnswerPlan, response_id: str, *, is_stored: bool, created_at: int | None = None
) -> ResponseWriter:
    fields = checked.fields
    return ResponseWriter(
        response_id,
        echo(fields, checked.value, _effective(made) | {"store": is_stored}),
        made.orders[0].model.tokenizer if fields.wants_logprobs else None,
        checked.texts.seal if fields.wants_encrypted_reasoning else None,
        created_at,
        checked.translated.names,
    )


def row_of(
    request: web.Request, checked: Checked, body: dict[str, Any], created_at: int, *, is_background: bool = False
) -> StoredResponse:
    """Returns the row of a response with this body. Its time grows with both."""
    texts, before, response_id = checked.texts, checked.before, body["id"]
    asked = msgspec.json.encode(past.asked_of(response_id, checked.value, checked.items))
    written = msgspec.json.encode(body)
    return StoredResponse(
        id=response_id,
        tenant_id=request[PRINCIPAL].tenant_id,
        key_id=request[PRINCIPAL].key_id,
        state=body["status"],
        request=texts.pack(response_id, "request", asked),
        body=texts.pack(response_id, "body", written),
        created_at=created_at,
        is_background=is_background,
        previous_id=None if before is None else before.id,
        num_before=0 if before is None else before.num_before + 1,
        chain_bytes=len(asked) + (0 if is_background else len(written)) + (0 if before is None else before.chain_bytes),
    )
