"""`POST /v1/completions`: one engine request per prompt, one answer for all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from accounting.values.types import RequestFacts
from gateway.base import errors, ids
from gateway.generation.engine_request import EngineRequest
from gateway.generation.reply import AnswerPlan, answer
from gateway.generation.served.models import MAX_TOKENS, ServedModel, kept_prompt, output_bound
from gateway.generation.stream import GenerationGroup
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.routes import bought, common
from gateway.routes.chat import rules
from gateway.routes.prompt_facts import PromptFacts, in_turn
from gateway.schema import completions
from gateway.schema.completions import CompletionFields
from gateway.schema.sampling import MAX_CHOICES, check_vocabulary, sampling_params
from gateway.schema.search import beams_of
from gateway.structured.form import Form
from gateway.telemetry.keys import RECORD
from gateway.text.choice import TokenEntry, texts_of
from gateway.writers.chunks import ChunkWriter
from gateway.writers.completions import CompletionForm, Echo, EchoArrays
from workers.protocol.messages import TokenLogprob
from workers.protocol.prompt_logprobs import unpack


async def create(request: web.Request) -> web.StreamResponse:
    """Continues one or more prompts of text or token ids."""
    return await common.answer_once(request, plan, answer)


async def plan(request: web.Request, value: dict[str, Any], line: tuple[str, int] | None = None) -> AnswerPlan:
    """Returns the plan of the request. Raises `ApiError`."""
    fields, ignored = await common.aside(request, completions.read, value)
    model = common.served_model(request, fields.model, "generate")
    if model.is_foreign:
        return await bought.completion_plan(request, value, fields, ignored, model, line)
    check_vocabulary(fields, model.tokenizer.vocab_size)
    common.check_choices(request, model, fields)
    texts = await common.aside(request, completions.prompts, fields.prompt, model.tokenizer.vocab_size)
    if line is not None and len(texts) > 1:  # a line is charged by one ledger entry
        raise errors.invalid("A batch line has one prompt: give each a line of its own.", "prompt")
    if len(texts) * fields.num_drawn > MAX_CHOICES:
        raise errors.invalid(f"A request may have at most {MAX_CHOICES} choices.", "prompt")
    form = await common.form_of(request, fields)
    bad_words = await common.bad_words_of(request, fields, model)
    limit = common.max_len(request, model)
    prompts = await common.near(request, _encode, model, texts, fields, limit)
    facts = common.describe(request, value, fields, model, sum(map(len, prompts)), line)
    orders = _orders(request, facts, fields, model, prompts, form, bad_words)
    written = CompletionForm(
        model.tokenizer,
        fields.num_logprobs,
        num_choices=fields.num_choices,
        with_ids=bool(fields.return_token_ids),
        names_ids=bool(fields.return_tokens_as_token_ids),
    )
    writer = ChunkWriter(written, fields, len(orders) * fields.num_choices)
    plan = AnswerPlan(fields, orders, writer, ignored, work=common.work_of(request))
    echoes = _Echoes(plan, written) if fields.echo else None
    facts_of = PromptFacts(plan, writer, written.prompts.update)
    return msgspec.structs.replace(
        plan, before_text=in_turn(echoes, facts_of if PromptFacts.are_wanted(fields) else None)
    )


def _encode(
    model: ServedModel, prompts: Sequence[str | array[int]], fields: CompletionFields, limit: int
) -> list[array[int]]:
    encoded: list[array[int]] = []
    num_left = max(model.max_model_len, MAX_TOKENS)
    keep, side = fields.truncate_prompt_tokens, fields.truncation_side
    for one in prompts:
        if isinstance(one, str):
            one = model.encode_text(one, fields.add_special_tokens is not False, is_cut=keep is not None)
        num_left -= len(one)
        encoded.append(kept_prompt(model, limit, one, fields.max_output, keep, side))
        if not encoded[-1]:
            raise errors.invalid("The prompt has no tokens.", "prompt")
        if num_left < 0:
            raise errors.invalid(f"The prompts have more than {MAX_TOKENS:,} tokens.", "prompt")
    return encoded


def _orders(
    request: web.Request,
    facts: RequestFacts,
    fields: CompletionFields,
    model: ServedModel,
    prompts: Sequence[array[int]],
    form: Form | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> list[EngineRequest]:
    """Returns one engine request per prompt. The first has the request's own id, the others ids of their own: each is a
    ledger entry.
    """
    limit = common.max_len(request, model)
    ranked = fields.num_drawn > fields.num_choices
    num_logprobs = max(0, fields.num_logprobs) if ranked else fields.num_logprobs

    def bound(prompt: array[int]) -> int:
        least = fields.min_tokens or 0
        return output_bound(model, limit, len(prompt), fields.max_output, "prompt", least, cut=bool(fields.truncate))

    base = EngineRequest(
        facts=msgspec.structs.replace(facts, prompt_tokens=len(prompts[0])),
        principal=request[PRINCIPAL],
        model=model,
        prompt=prompts[0],
        sampling=sampling_params(fields, model.defaults, num_logprobs, bad_words),
        num_choices=fields.num_drawn,
        num_shown=fields.num_choices,
        beams=beams_of(fields),
        max_tokens=bound(prompts[0]),
        rules=msgspec.structs.replace(rules(fields), shows_end=fields.num_logprobs >= 0),
        namespace=common.namespace_of(request, model, prompts[0], facts.user, fields.cache_salt),
        form=form,
        prompt_logprobs=fields.num_prompt_logprobs,
        traceparent=request[RECORD].worker_traceparent,
        is_whole=not fields.stream,
    )
    others = [
        msgspec.structs.replace(
            base,
            facts=msgspec.structs.replace(facts, request_id=ids.request_id(), prompt_tokens=len(prompt)),
            prompt=prompt,
            namespace=common.namespace_of(request, model, prompt, facts.user, fields.cache_salt),
            max_tokens=bound(prompt),
        )
        for prompt in prompts[1:]
    ]
    return [base, *others]


class _Echoes:
    """Puts the prompts in front of their completions, with their logprobs if these were asked for."""

    def __init__(self, plan: AnswerPlan, written: CompletionForm) -> None:
        self._plan = plan
        self._written = written

    async def __call__(self, run: GenerationGroup, numbers: Sequence[int]) -> None:
        for number in numbers:
            prompt = self._plan.orders[number].prompt
            num_entries = (1 + max(0, self._written.num_logprobs)) * len(prompt)
            work = partial(self._echo, prompt, run.generations[number].prompt_logprobs)
            self._written.echoes[number] = await self._plan.work(num_entries, work)

    def _echo(self, prompt: Sequence[int], parts: Sequence[bytes]) -> Echo:
        texts = texts_of(self._written.tokenizer, prompt, skip_special_tokens=True)
        if self._written.num_logprobs < 0:
            return Echo("".join(texts))
        arrays = EchoArrays(self._written)
        pairs = zip(prompt, texts, strict=True)
        offset = 0
        for logprobs in unpack(parts):
            entries = []
            for logprob, (token, text) in zip(logprobs, pairs, strict=False):
                if logprob is not None:  # there may be more than these, for `prompt_logprobs`
                    logprob = TokenLogprob(logprob.logprob, logprob.top[: self._written.num_logprobs])
                entries.append(TokenEntry(token, logprob, offset))
                offset += len(text)
            arrays.add(entries)
        return Echo("".join(texts), arrays.encoded())


ROUTES = [Route("POST", "/v1/completions", create, "chat", takes=CompletionFields)]
