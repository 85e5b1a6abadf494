"""`/v1/responses`: its body becomes a body of chat, the answer is written as items and events, and it is stored."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from aiohttp import web

from accounting.values import ids
from gateway.base import errors
from gateway.generation import quotes
from gateway.generation.reply import AnswerPlan, answer
from gateway.generation.writer import Ending
from gateway.http.body import NUM_BODY_BYTES
from gateway.http.route_table import Route
from gateway.idempotency import idempotency
from gateway.idempotency.claimed_key import CLAIMED_KEY
from gateway.responses import past, store
from gateway.routes import background_responses, common
from gateway.routes.response_plans import Checked, check, plan_chat, row_of, stores, writer_of
from gateway.schema import query
from gateway.schema.organization import reply
from gateway.schema.responses import ResponseFields
from gateway.schema.switches import THINKING
from gateway.writers.compaction import CompactionWriter
from gateway.writers.responses import ResponseWriter

PATH = "/v1/responses/{response_id}"
PAGE, MAX_PAGE = 20, 100
NOT_OF_THE_PROMPT = frozenset({"background", "stream", "stream_options", "store"})
MAX_SUMMARY_TOKENS = 2_048
SUMMARISE = (
    "Summarise the conversation above for yourself, so that it can go on without its earlier turns. Keep what was asked, "
    "what was decided, what the tools answered, open questions, names and numbers. Answer with the summary alone."
)


async def create(request: web.Request) -> web.StreamResponse:
    """Creates a response; it may be streamed, stored, or run in the background."""
    value = await common.known_object(request)
    line = common.batch_line(request)
    return await idempotency.once(request, value, line, lambda: _create(request, value, line))


async def _create(request: web.Request, value: dict[str, Any], line: tuple[str, int] | None) -> web.StreamResponse:
    if value.get("background"):
        if CLAIMED_KEY in request and line is None:
            raise errors.invalid("An Idempotency-Key cannot be used with a response in the background.", "background")
        return await background_responses.create(request, value)
    async with (
        common.unless_overloaded(request, value),
        quotes.bound(request, await plan(request, value, line)) as bound,
    ):
        return await answer(request, bound)


async def plan(request: web.Request, value: dict[str, Any], line: tuple[str, int] | None = None) -> AnswerPlan:
    """Returns the plan of the request. Raises `ApiError`."""
    checked = await check(request, value)
    made = await plan_chat(request, checked, line)
    is_stored = stores(request, checked.fields)
    writer = writer_of(checked, made, ids.new_id("resp"), is_stored=is_stored)
    keep = _keeper(request, checked, writer) if is_stored else None
    return msgspec.structs.replace(made, writer=writer, ignored=checked.ignored, keep=keep)


def _keeper(request: web.Request, checked: Checked, writer: ResponseWriter) -> Callable[[Ending], Awaitable[None]]:
    """Returns what stores the response before its settlement. So a response that was paid for is stored."""

    async def keep(ending: Ending) -> None:
        body = writer.whole("", [], ending)
        await store.insert(request, await common.aside(request, row_of, request, checked, body, int(time.time())))

    return keep


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Shows a stored response."""
    row = await store.find(request, request.match_info["response_id"])
    texts = await store.texts_of(request)
    if query.boolean(request.query, "stream"):
        return await background_responses.stream(request, row, texts)
    return await background_responses.shown(request, row, texts)


async def delete(request: web.Request) -> web.Response:
    """Deletes a stored response."""
    response_id = request.match_info["response_id"]
    await store.remove(request, response_id)
    return reply({"id": response_id, "object": "response", "deleted": True})


async def list_items(request: web.Request) -> web.Response:
    """Lists the items that the response was made from: the conversation before it, and its own input."""
    newest_first = query.choice(request.query, "order", ("asc", "desc")) != "asc"
    most, after = query.limit(request.query, PAGE, MAX_PAGE), query.text(request.query, "after")
    row = await store.find(request, request.match_info["response_id"])
    texts = await store.texts_of(request)
    request[NUM_BODY_BYTES] = row.chain_bytes
    before = await store.chain(request, row.previous_id) if row.previous_id is not None else []
    items = await common.aside(request, past.input_of, texts, before, row)
    return reply(past.page(items, newest_first=newest_first, after=after, most=most))


async def count(request: web.Request) -> web.Response:
    """Counts the tokens of the prompt that a response would have."""
    value = await common.json_object(request)
    asked = {name: item for name, item in value.items() if name not in NOT_OF_THE_PROMPT}
    made = await plan_chat(request, await check(request, asked | {"store": False}))
    return reply({"object": "response.input_tokens", "input_tokens": len(made.orders[0].prompt)})


async def compact(request: web.Request) -> web.StreamResponse:
    """Lets the model summarise a conversation. The summary is an item that only this tenant can send back."""
    value = await common.known_object(request)
    return await idempotency.once(request, value, common.batch_line(request), lambda: _compact(request, value))


async def _compact(request: web.Request, value: dict[str, Any]) -> web.StreamResponse:
    asked = {name: item for name, item in value.items() if name not in NOT_OF_THE_PROMPT}
    checked = await check(request, asked | {"store": False})
    texts = await store.texts_of(request)
    template = common.served_model(request, checked.fields.model, "generate").template
    _ask_for_summary(checked.translated.body, () if template is None else template.switches)
    made = await plan_chat(request, checked)
    (order,) = made.orders
    order = msgspec.structs.replace(order, max_tokens=min(order.max_tokens, MAX_SUMMARY_TOKENS))
    response_id = ids.new_id("resp")
    items = past.asked_of(response_id, value, [*checked.history, *checked.items]).items
    writer = CompactionWriter(response_id, past.of_user(items), texts.seal)
    made = msgspec.structs.replace(made, orders=[order], writer=writer, ignored=checked.ignored)
    async with common.unless_overloaded(request, value):
        return await answer(request, made)


def _ask_for_summary(body: dict[str, Any], switches: Collection[str]) -> None:
    """Makes a body of chat ask for a summary, which is a text: no call, no form, and no reasoning where the template has a
    switch for it. The tools stay in the prompt, which the cache knows with them.
    """
    body["messages"].append({"role": "user", "content": SUMMARISE})
    for name in ("response_format", "structured_outputs"):
        body.pop(name, None)
    if "tools" in body:
        body["tool_choice"] = "none"
    if any(name in switches for name in THINKING):
        body["reasoning_effort"] = "none"


ROUTES = [
    Route("POST", "/v1/responses/input_tokens", count, "chat", takes=ResponseFields),
    Route("POST", "/v1/responses/compact", compact, "chat", takes=ResponseFields),
    Route("POST", "/v1/responses", create, "chat", takes=ResponseFields),
    Route("GET", PATH, retrieve, "chat"),
    Route("DELETE", PATH, delete, "chat"),
    Route("GET", f"{PATH}/input_items", list_items, "chat"),
    Route("POST", f"{PATH}/cancel", background_responses.cancel, "chat"),
    Route("POST", f"{PATH}/run", background_responses.run, "run"),
]
