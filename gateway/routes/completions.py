"""`POST /v1/completions`: one request of the engine per prompt, one answer for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from gateway import errors, idempotency, ids, quotes
from gateway.keys import PRINCIPAL, RECORD
from gateway.models import ServedModel, output_bound
from gateway.order import Order
from gateway.reply import Plan, answer
from gateway.routes import common
from gateway.routes.chat import rules
from gateway.routes.table import Route
from gateway.schema import completions
from gateway.schema.completions import CompletionFields
from gateway.schema.replies import CompletionShape, Echo
from gateway.schema.sampling import check_vocabulary, sampling_params
from gateway.schema.search import beams_of
from gateway.stream import Run
from gateway.structured.form import Form
from gateway.text.choice import TokenEntry, texts_of
from workers.protocol.messages import TokenLogprob

MAX_CHOICES = 128


async def create(request: web.Request) -> web.StreamResponse:
    value = await common.json_object(request)
    if common.batch_line(request) is not None:
        raise errors.invalid("A batch runs chat completions only.")
    return await idempotency.once(request, value, None, lambda: _create(request, value))


async def _create(request: web.Request, value: dict[str, Any]) -> web.StreamResponse:
    async with (
        common.unless_overloaded(request, value),
        quotes.bound(request, value, await plan(request, value)) as bound,
    ):
        return await answer(request, bound)


async def plan(request: web.Request, value: dict[str, Any]) -> Plan:
    """What the request would run. Raises `ApiError`."""
    fields, ignored = completions.read(value)
    model = common.served_model(request, fields.model)
    check_vocabulary(fields, model.tokenizer.vocab_size)
    texts = completions.prompts(fields.prompt, model.tokenizer.vocab_size)
    if len(texts) * fields.num_drawn > MAX_CHOICES:
        raise errors.invalid(f"At most {MAX_CHOICES} choices in one request.", "prompt")
    form = await common.form_of(request, fields)
    bad_words = await common.bad_words_of(request, fields, model)
    prompts = await common.in_thread(request, _encode, model, texts)
    request[RECORD].mark("tokenized")
    request[RECORD].num_prompt_tokens = sum(map(len, prompts))
    end_user = common.end_user(value)
    orders = _orders(request, fields, model, prompts, form, bad_words, end_user)
    shape = CompletionShape(model.tokenizer, fields.num_logprobs, num_choices=fields.num_choices)
    before_text = _Echoes(shape, prompts) if fields.echo else _nothing
    return Plan(fields, orders, shape, ignored, before_text)


def _encode(model: ServedModel, prompts: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
    encoded = [model.encode_text(one) if isinstance(one, str) else one for one in prompts]
    if not all(encoded):
        raise errors.invalid("The prompt has no tokens.", "prompt")
    return encoded


def _orders(
    request: web.Request,
    fields: CompletionFields,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    form: Form | None,
    bad_words: tuple[tuple[int, ...], ...],
    end_user: str,
) -> list[Order]:
    """The first has the request's own id, the others ids of their own: each is a ledger entry."""
    limit = common.max_len(request, model)
    ranked = fields.num_drawn > fields.num_choices
    num_logprobs = max(0, fields.num_logprobs) if ranked else fields.num_logprobs
    base = Order(
        request_id=request[RECORD].request_id,
        principal=request[PRINCIPAL],
        model=model,
        prompt=prompts[0],
        sampling=sampling_params(fields, model.defaults, num_logprobs, bad_words),
        num_choices=fields.num_drawn,
        num_shown=fields.num_choices,
        beams=beams_of(fields),
        max_tokens=output_bound(model, limit, len(prompts[0]), fields.max_output, "prompt"),
        rules=rules(fields),
        namespace=common.namespace_of(request, model, prompts[0], fields.cache_salt),
        tier=common.tier_of(request),
        end_user=end_user,
        form=form,
        prompt_logprobs=fields.num_logprobs if fields.echo else -1,
        traceparent=request[RECORD].outgoing_traceparent,
    )
    others = [
        dataclasses.replace(
            base,
            request_id=ids.request_id(),
            prompt=prompt,
            namespace=common.namespace_of(request, model, prompt, fields.cache_salt),
            max_tokens=output_bound(model, limit, len(prompt), fields.max_output, "prompt"),
        )
        for prompt in prompts[1:]
    ]
    return [base, *others]


class _Echoes:
    """Puts the prompts, scored if logprobs were asked for, in front of their completions."""

    def __init__(self, shape: CompletionShape, prompts: Sequence[Sequence[int]]) -> None:
        self._shape = shape
        self._prompts = prompts

    def __call__(self, run: Run) -> None:
        self._shape.echoes = [
            self._echo(prompt, generation.prompt_logprobs)
            for prompt, generation in zip(self._prompts, run.generations, strict=True)
        ]

    def _echo(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> Echo:
        texts = texts_of(self._shape.tokenizer, prompt, skip_special_tokens=True)
        entries: list[TokenEntry] = []
        offset = 0
        for token, text, logprob in zip(
            prompt, texts, logprobs or [None] * len(prompt), strict=True
        ):
            entries.append(TokenEntry(token, logprob, offset))
            offset += len(text)
        return Echo("".join(texts), tuple(entries) if self._shape.num_logprobs >= 0 else ())


def _nothing(run: Run) -> None:
    pass


ROUTES = [Route("POST", "/v1/completions", create, "chat", takes=CompletionFields)]
