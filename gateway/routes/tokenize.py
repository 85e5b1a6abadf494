"""`POST /tokenize` and `/detokenize`: the token ids that inference uses, without inference."""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from gateway.base import errors
from gateway.generation.served.models import ServedModel, context_exceeded, kept_prompt
from gateway.http.route_table import Route
from gateway.routes import common
from gateway.routes.chat import encoded, tools_of
from gateway.schema import parameters
from gateway.schema.chat import check_continuation
from gateway.schema.completions import DEFAULT_MAX_TOKENS
from gateway.schema.sampling import check_truncation

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class TokenizeFields(msgspec.Struct, frozen=True):
    model: Name
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_strs: bool | None = None

    @property
    def ends_open(self) -> bool:
        return self.add_generation_prompt is not False and not self.continue_final_message


class DetokenizeFields(msgspec.Struct, frozen=True):
    model: Name
    tokens: list[Annotated[int, Meta(ge=0)]]


async def tokenize(request: web.Request) -> web.Response:
    """Turns text or a conversation into token ids."""
    fields, ignored = await _read(request, TokenizeFields, "tokenize")
    model = common.served_model(request, fields.model)
    headers = await common.count(request, model)
    if (fields.prompt is None) == (fields.messages is None):
        raise errors.invalid("Exactly one of 'prompt' and 'messages' is needed.", "prompt")
    check_truncation(fields.truncate_prompt_tokens, fields.truncation_side)
    asked = fields.max_completion_tokens or fields.max_tokens
    if fields.messages is not None:
        check_continuation(fields.continue_final_message, fields.add_generation_prompt, fields.messages)
        tools = await tools_of(request, fields)
        tokens = (await encoded(request, model, fields, tools, asked)).tokens
    else:
        tokens = await common.in_thread(request, _encoded_text, model, fields, common.max_len(request, model), asked)
    answer = {"count": len(tokens), "max_model_len": common.max_len(request, model)}
    return _json(await common.in_thread(request, _spelled, model, fields, answer, tokens), ignored, headers)


def _encoded_text(model: ServedModel, fields: TokenizeFields, limit: int, asked: int | None) -> array[int]:
    keep = fields.truncate_prompt_tokens
    tokens = model.encode_text(fields.prompt or "", fields.add_special_tokens is not False, is_cut=keep is not None)
    return kept_prompt(
        model, limit, tokens, DEFAULT_MAX_TOKENS if asked is None else asked, keep, fields.truncation_side
    )


def _spelled(model: ServedModel, fields: TokenizeFields, answer: dict[str, Any], tokens: array[int]) -> bytes:
    answer = answer | {"tokens": tokens.tolist()}
    if fields.return_token_strs is not False:
        answer["token_strs"] = [model.tokenizer.token_text(token) for token in tokens]
    return msgspec.json.encode(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Turns token ids into text."""
    fields, ignored = await _read(request, DetokenizeFields, "detokenize")
    model = common.served_model(request, fields.model)
    headers = await common.count(request, model)
    limit = common.max_len(request, model)
    return _json(await common.in_thread(request, _text, model, fields.tokens, limit), ignored, headers)


def _text(model: ServedModel, tokens: list[int], limit: int) -> bytes:
    if len(tokens) > limit:
        raise context_exceeded(limit, len(tokens), 0, "tokens")
    if any(token >= model.tokenizer.vocab_size for token in tokens):
        raise errors.invalid("A token id is outside of the vocabulary.", "tokens")
    return msgspec.json.encode({"prompt": model.tokenizer.decode_long(tokens)})


async def _read(
    request: web.Request, kind: type[common.S], endpoint: Literal["tokenize", "detokenize"]
) -> tuple[common.S, list[str]]:
    return await common.aside(request, parameters.read, await common.json_object(request), kind, endpoint)


def _json(body: bytes, ignored: list[str], headers: dict[str, str]) -> web.Response:
    if ignored:
        headers["x-headgate-ignored"] = ", ".join(ignored)
    return web.Response(body=body, content_type="application/json", headers=headers)


ROUTES = [
    Route("POST", "/tokenize", tokenize, "chat", takes=TokenizeFields),
    Route("POST", "/detokenize", detokenize, "chat", takes=DetokenizeFields),
]
