"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

A body becomes a chat body, and chat does the rest; only the answer is written in Anthropic's words.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from gateway.base import errors
from gateway.generation.reply import AnswerPlan, answer
from gateway.generation.served.models import ServedModel
from gateway.generation.stream import GenerationGroup
from gateway.http.route_table import Route
from gateway.messages import fields as messages
from gateway.messages.fields import CountFields, MessagesFields
from gateway.messages.names import renamed
from gateway.messages.request import Reader, Translated, prompt_of, to_chat
from gateway.routes import bought, chat, common
from gateway.writers.messages import MessageWriter

T = TypeVar("T")


async def create(request: web.Request) -> web.StreamResponse:
    """Answers a conversation in the shape of the Messages API."""
    return await common.answer_once(request, plan, answer)


async def plan(request: web.Request, value: dict[str, Any], line: tuple[str, int] | None = None) -> AnswerPlan:
    """Returns the plan of the request. Raises `ApiError` that names the caller's own fields."""
    fields, ignored = await common.aside(request, messages.read, value)
    model = common.served_model(request, fields.model)
    translated = await common.aside(request, to_chat, fields, reader_of(request, model))
    made = await _told_by_own_names(translated, lambda: chat.plan(request, translated.body, line, fit=True))
    [order] = made.orders
    shows_thoughts = fields.thinking is None or fields.thinking.shows_thoughts
    writer = MessageWriter(fields.model, order.facts.tier, shows_thoughts=shows_thoughts)
    total, limit = len(order.prompt) + order.max_tokens, common.max_len(request, order.model)
    fills_context = order.max_tokens < fields.max_tokens and total >= limit

    async def note_run(run: GenerationGroup, _: Sequence[int]) -> None:
        writer.prompt = run.usage
        writer.fills_context = fills_context and not run.generations[0].order.is_bought  # theirs may be longer

    return msgspec.structs.replace(made, writer=writer, ignored=ignored, before_text=note_run)


async def count(request: web.Request) -> web.Response:
    """Returns the number of tokens of the prompt that `create` would make."""
    value = await common.json_object(request)
    fields = await common.aside(request, messages.read_count, value)
    model = common.served_model(request, fields.model)
    translated = await common.aside(request, prompt_of, fields, reader_of(request, model))
    prompt = await _told_by_own_names(translated, lambda: chat.prompt_of(request, translated.body))
    return web.json_response({"input_tokens": len(prompt)})


def reader_of(request: web.Request, model: ServedModel) -> Reader:
    """Returns what the translation must know of the model. Raises `ApiError` 400 for one without a chat template."""
    if model.is_foreign:
        link = bought.link_of(request, model)
        kinds = {place.upstream.source.kind for place in link.places} if link is not None else set()
        return Reader(thinks="never" if kinds == {"anthropic"} else "unknown")  # Anthropic thinks if it is asked to
    switches, template, syntax = model.switches, model.template, model.syntax
    assert template is not None
    thinks: Literal["never", "may", "always"] = "never"
    if syntax.dialect.has_channels or syntax.is_open_after(template.example):
        thinks = "always"
    elif syntax.style is not None:
        thinks = "may"
    return Reader(switches, thinks)


async def _told_by_own_names(translated: Translated, work: Callable[[], Awaitable[T]]) -> T:
    try:
        return await work()
    except errors.ApiError as error:
        raise renamed(error, translated.origins) from None


ROUTES = [
    Route("POST", "/v1/messages", create, "chat", takes=MessagesFields),
    Route("POST", "/v1/messages/count_tokens", count, "chat", takes=CountFields),
]
