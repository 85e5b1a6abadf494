"""`POST /tokenize` and `/detokenize`: the ids of inference, without inference."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway import errors
from gateway.routes import common
from gateway.routes.table import Route
from gateway.schema.convert import convert

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class TokenizeFields(msgspec.Struct, frozen=True):
    model: Name
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeFields(msgspec.Struct, frozen=True):
    model: Name
    tokens: list[Annotated[int, Meta(ge=0)]]


async def tokenize(request: web.Request) -> web.Response:
    fields = convert(await common.json_object(request), TokenizeFields)
    model = common.served_model(request, fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise errors.invalid("Exactly one of 'prompt' and 'messages' is needed.", "prompt")
    if fields.messages is not None:
        tokens = await common.in_thread(
            request,
            model.encode_chat,
            fields.messages,
            add_generation_prompt=fields.add_generation_prompt,
        )
    else:
        tokens = await common.in_thread(
            request, model.encode_text, fields.prompt or "", fields.add_special_tokens
        )
    return _json(
        {
            "count": len(tokens),
            "max_model_len": common.max_len(request, model),
            "tokens": tokens,
            "token_strs": [model.tokenizer.token_text(token) for token in tokens],
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    fields = convert(await common.json_object(request), DetokenizeFields)
    model = common.served_model(request, fields.model)
    if any(token >= model.tokenizer.vocab_size for token in fields.tokens):
        raise errors.invalid("A token id is outside of the vocabulary.", "tokens")
    text = await common.in_thread(
        request, model.tokenizer.decode, fields.tokens, skip_special_tokens=False
    )
    return _json({"prompt": text})


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


ROUTES = [
    Route("POST", "/tokenize", tokenize, "chat", takes=TokenizeFields),
    Route("POST", "/detokenize", detokenize, "chat", takes=DetokenizeFields),
]
