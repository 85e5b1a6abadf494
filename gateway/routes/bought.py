"""Requests that an upstream may answer: a checked body becomes an `Ask`, and for a model that has upstreams alone a plan.

No field that changes the answer is dropped: one that no upstream is asked for is refused with its name.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from gateway.base import errors, ids
from gateway.generation.engine_request import EngineRequest
from gateway.generation.reply import AnswerPlan
from gateway.generation.served.models import ServedModel
from gateway.generation.stream import GENERATION
from gateway.generation.vectors import VectorPlan, embeddings_body
from gateway.http.auth import PRINCIPAL
from gateway.routes import common
from gateway.routes.pooling import check_answer
from gateway.schema import chat, completions
from gateway.schema.chat import ChatFields
from gateway.schema.completions import CompletionFields
from gateway.schema.embeddings import EmbeddingFields
from gateway.schema.sampling import MAX_CHOICES, SamplingFields
from gateway.schema.tools import Tools
from gateway.telemetry.keys import RECORD
from gateway.text.choice import TextRules
from gateway.upstreams.market import UpstreamLink
from gateway.upstreams.wires import anthropic
from gateway.upstreams.wires.values import Ask, Endpoint, Interval
from gateway.upstreams.witness import of_bytes, of_count
from gateway.writers.chat import ChatForm
from gateway.writers.chunks import ChunkWriter
from gateway.writers.completions import CompletionForm
from workers.protocol.messages import PoolingParams, SamplingParams

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "seed", "stop"),
)
PASSED: Mapping[Endpoint, frozenset[str]] = {
    "chat": frozenset(
        {*_SAMPLING, "messages", "response_format", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}
    ),
    "completions": frozenset({*_SAMPLING, "prompt"}),
    "embeddings": frozenset({"input", "dimensions"}),
}
"""The fields that an upstream is asked for."""
OURS = frozenset(
    {
        *("model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "metadata", "service_tier"),
        *("prompt_cache_key", "include_reasoning", "encoding_format", "truncate", "modalities"),
    }
)
"""The fields that the gateway itself honours, whoever answers."""
_IDLE = (
    *("use_beam_search", "include_stop_str_in_output", "ignore_eos", "min_tokens", "return_token_ids"),
    *("return_tokens_as_token_ids", "echo"),
)
IDLE: Mapping[Endpoint, frozenset[str]] = {
    "chat": frozenset({*_IDLE, "logprobs", "continue_final_message", "add_special_tokens"}),
    "completions": frozenset(_IDLE),
}
"""The fields that ask for nothing if they are false or 0. Any other is refused whatever its value is."""
USUAL: Mapping[str, Any] = {"add_generation_prompt": True}
"""The values that say what every upstream does."""
PER_MESSAGE, PER_PROMPT, OF_TOOLS = 16, 64, 1024
"""Tokens of a prompt that are no text of the client's, at most."""
USUAL_VECTOR = 4096


def link_of(request: web.Request, model: ServedModel) -> UpstreamLink | None:
    return request.app[GENERATION].capacity.market.links.get(model.on_workers)


def need_link(request: web.Request, model: ServedModel) -> UpstreamLink:
    link = link_of(request, model)
    if link is None:
        raise errors.no_worker()
    return link


def chat_ask(
    link: UpstreamLink, value: Mapping[str, Any], fields: ChatFields, counted: int | None, *, fit: bool = False
) -> Ask:
    """Returns what an upstream is asked. `counted` is the number of the prompt's tokens by a tokenizer, if there is
    one. Raises `ApiError` 400 for what no upstream can be asked.
    """
    _check_fields(fields, "chat")
    _refuse_custom(fields.tools or ())
    messages = chat.template_messages(fields.messages, lambda text, own: text)
    body = _passed(value, fields, "chat") | {"messages": [_message(message) for message in messages]}
    if not fields.tools:
        body = {name: item for name, item in body.items() if name not in ("tool_choice", "parallel_tool_calls")}
    tools = msgspec.json.encode(fields.tools or [])
    overhead = PER_PROMPT + PER_MESSAGE * len(messages) + (OF_TOOLS if fields.tools else 0)
    if "response_format" in body:  # some providers write it into the prompt
        overhead += len(msgspec.json.encode(body["response_format"]))
    prompt = _interval(len(msgspec.json.encode(messages)) + len(tools), counted, overhead)
    most = _max_tokens(link, fields.max_output, fit=fit or bool(fields.truncate))
    ask = Ask("chat", body, fields.num_choices, most, prompt)
    _check_kinds(link, ask)
    return ask


def _refuse_custom(tools: Sequence[Any]) -> None:
    """Refuses tools whose input is a text: the form of their calls cannot be enforced there. Raises `ApiError` 400."""
    for i, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type") == "custom":
            message = "Tools of the type 'custom' are not served for this model, which an upstream answers for."
            raise errors.invalid(message, f"tools[{i}].type", "unsupported_parameter")


async def chat_plan(
    request: web.Request,
    value: dict[str, Any],
    fields: ChatFields,
    ignored: Sequence[str],
    model: ServedModel,
    tools: Tools,
    line: tuple[str, int] | None,
    *,
    fit: bool,
) -> AnswerPlan:
    """Returns the plan of chat with a model that has upstreams alone. If `fit`, a bound beyond the model's is the
    model's. Raises `ApiError`.
    """
    link = need_link(request, model)
    await common.form_of(request, fields)  # a form that is none is refused here, and not by a stranger
    ask = await common.near(request, lambda: chat_ask(link, value, fields, _counted(model, fields), fit=fit))
    order = _order(request, value, fields, model, ask, line)
    with_reasoning = fields.include_reasoning is not False
    written = ChatForm(
        model.tokenizer, with_logprobs=False, with_reasoning=with_reasoning, is_named=tools.mode == "named"
    )
    return AnswerPlan(
        fields, [order], ChunkWriter(written, fields, fields.num_choices), ignored, work=common.work_of(request)
    )


async def completion_plan(
    request: web.Request,
    value: dict[str, Any],
    fields: CompletionFields,
    ignored: Sequence[str],
    model: ServedModel,
    line: tuple[str, int] | None,
) -> AnswerPlan:
    """Returns the plan of completions with a model that has upstreams alone: one request for each prompt."""
    link = need_link(request, model)
    texts = _texts(completions.prompts(fields.prompt, 2**31, "prompt"), "prompt")
    if line is not None and len(texts) > 1:
        raise errors.invalid("A batch line has one prompt: give each a line of its own.", "prompt")
    if len(texts) * fields.num_drawn > MAX_CHOICES:
        raise errors.invalid(f"A request may have at most {MAX_CHOICES} choices.", "prompt")
    asks = await common.near(request, lambda: [_completion_ask(link, value, fields, model, text) for text in texts])
    orders = [_order(request, value, fields, model, asks[0], line)]
    for ask in asks[1:]:
        facts = msgspec.structs.replace(orders[0].facts, request_id=ids.request_id(), prompt_tokens=ask.prompt.high)
        orders.append(msgspec.structs.replace(orders[0], facts=facts, foreign=ask))
    written = CompletionForm(model.tokenizer, -1, num_choices=fields.num_choices)
    writer = ChunkWriter(written, fields, len(orders) * fields.num_choices)
    return AnswerPlan(fields, orders, writer, ignored, work=common.work_of(request))


def _completion_ask(
    link: UpstreamLink, value: Mapping[str, Any], fields: CompletionFields, model: ServedModel, text: str
) -> Ask:
    _check_fields(fields, "completions")
    prompt = _interval_of(model, [text], PER_PROMPT)
    body = _passed(value, fields, "completions") | {"prompt": text}
    most = _max_tokens(link, fields.max_output, fit=bool(fields.truncate))
    ask = Ask("completions", body, fields.num_choices, most, prompt)
    _check_kinds(link, ask)
    return ask


async def embedding_plan(
    request: web.Request,
    value: dict[str, Any],
    fields: EmbeddingFields,
    ignored: Sequence[str],
    model: ServedModel,
    texts: Sequence[str | array[int]],
    line: tuple[str, int] | None,
) -> VectorPlan:
    """Returns the plan of embeddings with a model that has upstreams alone. Raises `ApiError`."""
    link = need_link(request, model)
    if fields.truncate_prompt_tokens is not None:
        raise _unsupported("truncate_prompt_tokens")
    inputs = _texts(texts, "input")
    size = fields.dimensions or (link.hello.vector_size if link.hello else 0) or USUAL_VECTOR
    check_answer(len(inputs) * size, "input")
    prompt = await common.near(request, _interval_of, model, inputs, PER_MESSAGE * len(inputs))
    body: dict[str, Any] = {"input": inputs}
    if fields.dimensions is not None:
        body["dimensions"] = fields.dimensions
    ask = Ask("embeddings", body, len(inputs), 0, prompt)
    facts = common.describe(request, value, fields, model, prompt.high, line)
    params = PoolingParams("embed", (1,) * len(inputs), fields.dimensions or 0)
    order = EngineRequest.for_vectors(facts, request[PRINCIPAL], model, [], params, (), "")
    order = msgspec.structs.replace(order, foreign=ask, is_bought=True)
    written = partial(embeddings_body, fields.model, fields.encoding_format)
    return VectorPlan([order], written, len(inputs) * size, ignored, common.work_of(request))


async def with_ask(
    request: web.Request, order: EngineRequest, value: Mapping[str, Any], fields: ChatFields
) -> EngineRequest:
    """Returns the order of a model of our own with what an upstream would be asked, if there is one that can be."""
    link = link_of(request, order.model)
    if link is None or not order.principal.buys_overflow or order.model.adapter:
        return order
    try:
        ask = await common.aside(request, chat_ask, link, value, fields, len(order.prompt))
        return msgspec.structs.replace(order, foreign=ask)
    except errors.ApiError as error:  # our own workers can what no upstream is asked for
        return msgspec.structs.replace(order, unasked=error.param or "")


def _order(
    request: web.Request,
    value: Mapping[str, Any],
    fields: SamplingFields,
    model: ServedModel,
    ask: Ask,
    line: tuple[str, int] | None,
) -> EngineRequest:
    sampling = SamplingParams(
        seed=0 if fields.seed is None else fields.seed,
        **{name: given for name in ("temperature", "top_p") if (given := getattr(fields, name)) is not None},
    )
    return EngineRequest(
        facts=common.describe(request, value, fields, model, ask.prompt.high, line),
        principal=request[PRINCIPAL],
        model=model,
        prompt=array("i"),
        sampling=sampling,
        num_choices=fields.num_choices,
        max_tokens=ask.max_tokens,
        rules=TextRules(),
        namespace=(),
        traceparent=request[RECORD].worker_traceparent,
        foreign=ask,
        is_bought=True,
    )


def _check_fields(fields: msgspec.Struct, endpoint: Endpoint) -> None:
    for name in fields.__struct_fields__:
        given = getattr(fields, name)
        is_idle = given is None or (not given and name in IDLE[endpoint]) or given is USUAL.get(name)
        if not is_idle and name not in PASSED[endpoint] and name not in OURS:
            raise _unsupported(name)


def _unsupported(name: str) -> errors.ApiError:
    return errors.invalid(f"'{name}' is not offered with this model.", name, "unsupported_parameter")


def _check_kinds(link: UpstreamLink, ask: Ask) -> None:
    """Refuses what one of the upstreams cannot say: each of them may be the one that answers."""
    if any(place.upstream.source.kind == "anthropic" for place in link.places):
        anthropic.check(ask)


def _passed(value: Mapping[str, Any], fields: SamplingFields, endpoint: Endpoint) -> dict[str, Any]:
    """Returns the fields as they came, without those that are switched off: providers refuse some of these."""
    return {name: value[name] for name in PASSED[endpoint] if getattr(fields, name) is not None}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in message.items() if name != "thinking"}


def _max_tokens(link: UpstreamLink, asked: int | None, *, fit: bool = False) -> int:
    most = link.max_output_tokens
    if asked is not None and asked > most and not fit:
        raise errors.invalid(f"This model gives at most {most} tokens.", "max_tokens")
    return most if asked is None else max(1, min(most, asked))


def _interval(num_bytes: int, counted: int | None, overhead: int) -> Interval:
    return of_bytes(num_bytes, overhead) if counted is None else of_count(counted, overhead)


def _interval_of(model: ServedModel, texts: Sequence[str], overhead: int) -> Interval:
    """Returns how many tokens the texts have. A tokenizer takes seconds for megabytes."""
    counted = None if model.counter is None else sum(map(model.counter, texts))
    return _interval(sum(len(text.encode()) for text in texts), counted, overhead)


def _counted(model: ServedModel, fields: ChatFields) -> int | None:
    """Counts a prompt whose model has a tokenizer. Its template is the provider's: what it adds is overhead."""
    if model.counter is None:
        return None
    messages = chat.template_messages(fields.messages, lambda text, own: text)
    texts = [str(message.get("content") or "") for message in messages]
    calls = [msgspec.json.encode(message["tool_calls"]).decode() for message in messages if message.get("tool_calls")]
    tools = [msgspec.json.encode(fields.tools).decode()] if fields.tools else []
    return sum(map(model.counter, [*texts, *calls, *tools]))


def _texts(found: Sequence[str | array[int]], param: str) -> list[str]:
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) < len(found):
        raise errors.invalid("This model takes text, not token ids.", param)
    if not all(texts):
        raise errors.invalid("A text is empty.", param)
    return texts
