"""`/admin/v1/prefixes`: prompts that the operator publishes, so that every tenant finds them cached. Operator keys
only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from accounting.tenants import prefixes
from accounting.tenants.prefixes import PrefixInfo
from gateway.base import errors
from gateway.generation.prefixes import FILLER, PREFIXES, Fill
from gateway.generation.served.models import MODELS, ServedModel, context_exceeded
from gateway.generation.stream import GENERATION
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, writing
from gateway.routes import common
from gateway.schema import chat, query
from gateway.schema import prefixes as shapes
from gateway.schema.organization import deleted, page_of, reply

PATH = "/admin/v1/prefixes"
CONTINUATIONS = ("a", "Z", "7", "\n", "\u00e9", "\u6f22")
"""Texts that may follow a published prompt. Tokens that would differ between these continuations are not shared."""


async def create(request: web.Request) -> web.Response:
    """Publishes a prefix whose cached keys and values tenants share."""
    fields = await common.fields_of(request, shapes.NewPrefix)
    shapes.check(fields)
    model = request.app[MODELS].base(fields.model)
    tokens = fields.token_ids
    if tokens is None:
        tokens = await common.in_thread(request, _shared_tokens, model, fields)
    _check_tokens(request, model, tokens)
    async with writing(request, changes_identities=False) as conn:
        now = int(time.time())
        info = await prefixes.create(
            conn,
            name=fields.name,
            model=model.id,
            tokens=tokens,
            ttl_s=fields.ttl_s,
            now=now,
            actor=request[PRINCIPAL].key_id,
        )
        in_force = await prefixes.in_force(conn, now)
    request.app[PREFIXES].replace(in_force)
    return reply(_shape(info, {}))


async def list_all(request: web.Request) -> web.Response:
    """Lists the public prefixes."""
    async with reading(request) as conn:
        page = await prefixes.list_prefixes(conn, int(time.time()), **query.page(request.query))
    filler = request.app[FILLER]
    return reply(page_of(page, lambda info: _shape(info, filler.states(info.id))))


async def get(request: web.Request) -> web.Response:
    """Shows a public prefix."""
    async with reading(request) as conn:
        info = await prefixes.get(conn, request.match_info["prefix_id"], int(time.time()))
    return reply(_shape(info, request.app[FILLER].states(info.id)))


async def delete(request: web.Request) -> web.Response:
    """Deletes a public prefix."""
    prefix_id = request.match_info["prefix_id"]
    async with writing(request, changes_identities=False) as conn:
        now = int(time.time())
        await prefixes.delete(conn, prefix_id, now=now, actor=request[PRINCIPAL].key_id)
        in_force = await prefixes.in_force(conn, now)
    request.app[PREFIXES].replace(in_force)
    return reply(deleted(prefix_id, "prefix"))


def _shared_tokens(model: ServedModel, fields: shapes.NewPrefix) -> list[int]:
    """Returns the tokens that all continuations have in common. Runs in a thread. Raises `ApiError` 400."""
    if fields.text is not None:
        going_on = [model.encode_text(fields.text + more) for more in CONTINUATIONS]
    else:
        read, _ = chat.read({"model": model.id, "messages": fields.messages})
        going_on = [model.encode_chat([*read.messages, {"role": "user", "content": more}]) for more in CONTINUATIONS]
    same = itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*going_on, strict=False))
    return [ids[0] for ids in same]


def _check_tokens(request: web.Request, model: ServedModel, tokens: list[int]) -> None:
    if any(token >= model.tokenizer.vocab_size for token in tokens):
        raise errors.invalid("A token id is not in the model's vocabulary.", "token_ids")
    limit = common.max_len(request, model)
    if len(tokens) >= limit:
        raise context_exceeded(limit, len(tokens), 0, "messages")
    blocks = [
        link.hello.block_size
        for link in request.app[GENERATION].fleet.links
        if link.hello is not None and link.registration.model == model.id
    ]
    if len(tokens) < max(blocks, default=1):
        raise errors.invalid(
            f"A prompt of {len(tokens)} tokens is too short: only whole blocks of {max(blocks)} are shared.", "messages"
        )


ROUTES = [
    Route("POST", PATH, create, "admin", takes=shapes.NewPrefix),
    Route("GET", PATH, list_all, "admin"),
    Route("GET", f"{PATH}/{{prefix_id}}", get, "admin"),
    Route("DELETE", f"{PATH}/{{prefix_id}}", delete, "admin"),
]


def _shape(info: PrefixInfo, fills: Mapping[str, Fill]) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "prefix",
        "name": info.name,
        "model": info.model,
        "num_tokens": len(info.tokens),
        "created_at": info.created_at,
        "expires_at": info.expires_at,
        "pinned": True,
        "state": _state(fills),
        "workers": [
            {"worker": worker, "state": fill.state, "num_tokens": fill.num_tokens, "reason": fill.reason or None}
            for worker, fill in sorted(fills.items())
        ],
    }


def _state(fills: Mapping[str, Fill]) -> str:
    """Returns the state over all workers. If there is no worker, the prefix waits to be filled."""
    states = {fill.state for fill in fills.values()}
    return "failed" if "failed" in states else "pinned" if states == {"pinned"} else "filling"
