"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from gateway.base import errors
from gateway.generation.engine_request import EngineRequest
from gateway.generation.reply import AnswerPlan, answer
from gateway.generation.served.models import ChatPrompt, ServedModel, kept_prompt, output_bound
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.parsers.forced import Wanted
from gateway.routes import bought, common
from gateway.routes.prompt_facts import PromptFacts
from gateway.schema import chat
from gateway.schema.sampling import SamplingFields, check_vocabulary, sampling_params
from gateway.schema.search import beams_of
from gateway.schema.switches import SwitchFields, switches_of
from gateway.schema.tools import NO_TOOLS, Tools, has_grammar, read_tools
from gateway.structured.form import Form
from gateway.telemetry.keys import RECORD
from gateway.text.choice import TextRules
from gateway.text.stops import StopStrings
from gateway.writers.chat import ChatForm
from gateway.writers.chunks import ChunkWriter


async def create(request: web.Request) -> web.StreamResponse:
    """Answers a conversation: one body, or chunks as they are generated."""
    return await common.answer_once(request, plan, answer)


async def plan(
    request: web.Request, value: dict[str, Any], line: tuple[str, int] | None = None, *, fit: bool = False
) -> AnswerPlan:
    """Returns the plan of the request. If `fit`, an output bound beyond the context is the rest of the context. Raises
    `ApiError`.
    """
    fields, ignored = await common.aside(request, chat.read, value)
    model = common.served_model(request, fields.model, "generate")
    common.check_choices(request, model, fields)
    tools = await tools_of(request, fields)
    if model.is_foreign:
        return await bought.chat_plan(request, value, fields, ignored, model, tools, line, fit=fit)
    check_vocabulary(fields, model.tokenizer.vocab_size)
    answer_form = await common.form_of(request, fields)
    bad_words = await common.bad_words_of(request, fields, model)
    conversation = await encoded(request, model, fields, tools, fields.max_output)
    form = await _output_form(request, fields, model, tools, answer_form, conversation.is_thinking)
    prompt = conversation.tokens
    facts = common.describe(request, value, fields, model, len(prompt), line)
    order = EngineRequest(
        facts=facts,
        principal=request[PRINCIPAL],
        model=model,
        prompt=prompt,
        sampling=sampling_params(
            fields, model.defaults, fields.num_logprobs, bad_words + _unwanted(tools, model, form)
        ),
        num_choices=fields.num_drawn,
        num_shown=fields.num_choices,
        beams=beams_of(fields),
        max_tokens=output_bound(
            model,
            common.max_len(request, model),
            len(prompt),
            fields.max_output,
            "messages",
            fields.min_tokens or 0,
            cut=fit or bool(fields.truncate),
        ),
        rules=msgspec.structs.replace(
            rules(fields), marks=model.marks_without_tools if tools is NO_TOOLS else model.marks_read(tools)
        ),
        namespace=common.namespace_of(request, model, prompt, facts.user, fields.cache_salt),
        form=form,
        prompt_logprobs=-1 if fields.prompt_logprobs is None else fields.prompt_logprobs,
        make_parser=model.syntax.parser(tools, conversation.is_thinking),
        traceparent=request[RECORD].worker_traceparent,
        volatile=conversation.volatile,
        is_whole=not fields.stream and tools.parallel,
    )
    writer = _writer(fields, model, tools)
    order = await bought.with_ask(request, order, value, fields)
    plan = AnswerPlan(fields, [order], writer, ignored, work=common.work_of(request))
    if not PromptFacts.are_wanted(fields):
        return plan
    hook = PromptFacts(plan, writer, lambda found: writer.of_prompt.update(found[0]))
    return msgspec.structs.replace(plan, before_text=hook)


def _writer(fields: chat.ChatFields, model: ServedModel, tools: Tools) -> ChunkWriter:
    written = ChatForm(
        model.tokenizer,
        with_logprobs=bool(fields.logprobs),
        with_reasoning=fields.include_reasoning is not False,
        is_named=tools.mode == "named",
        with_ids=bool(fields.return_token_ids),
        names_ids=bool(fields.return_tokens_as_token_ids),
        echo=chat.echoed(fields.messages) if fields.echo else "",
    )
    return ChunkWriter(written, fields, fields.num_choices)


class Tooled(Protocol):
    """The fields that name tools."""

    @property
    def tools(self) -> list[Any] | None: ...
    @property
    def tool_choice(self) -> Any: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...


class Rendered(SwitchFields, Protocol):
    """The fields that say how messages become a prompt."""

    @property
    def messages(self) -> list[Any] | None: ...
    @property
    def ends_open(self) -> bool: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def add_special_tokens(self) -> bool | None: ...
    @property
    def truncate_prompt_tokens(self) -> int | None: ...
    @property
    def truncation_side(self) -> str | None: ...


async def encoded(
    request: web.Request, model: ServedModel, fields: Rendered, tools: Tools, asked: int | None
) -> ChatPrompt:
    """Returns the prompt of messages, for an output of `asked` tokens. Raises `ApiError` 400."""
    switches = switches_of(fields, model.switches)
    # Messages of a small body make no template slow; a variable that the client names may.
    run = common.in_thread if switches else common.near
    prompt = await run(
        request,
        model.chat_prompt,
        fields.messages or [],
        tools,
        switches,
        fields.ends_open,
        continues=bool(fields.continue_final_message),
        add_special_tokens=bool(fields.add_special_tokens),
        is_cut=fields.truncate_prompt_tokens is not None,
        moves_volatile=request[PRINCIPAL].cache.moves_volatile,
    )
    limit = common.max_len(request, model)
    tokens = kept_prompt(model, limit, prompt.tokens, asked, fields.truncate_prompt_tokens, fields.truncation_side)
    return msgspec.structs.replace(prompt, tokens=tokens)


async def _output_form(
    request: web.Request,
    fields: chat.ChatFields,
    model: ServedModel,
    tools: Tools,
    answer_form: Form | None,
    is_thinking: bool,
) -> Form | None:
    """Returns the form of the whole output: reasoning, calls and text. Raises `ApiError` 400."""
    budget, end = _budget(fields, model), model.end_of_thought
    wanted = Wanted(model.syntax, tools, answer_form, is_thinking, model.special_marks, budget, end)
    return await common.output_form_of(request, fields, wanted)


async def tools_of(request: web.Request, fields: Tooled) -> Tools:
    """Reads the tools: off the loop if there is a grammar, which takes far longer than JSON of its size. Raises
    `ApiError`.
    """
    if not fields.tools and fields.tool_choice is None:
        return NO_TOOLS
    where = common.in_thread if has_grammar(fields.tools) else common.aside
    return await where(request, read_tools, fields.tools, fields.tool_choice, fields.parallel_tool_calls)


async def prompt_of(request: web.Request, value: dict[str, Any]) -> Sequence[int]:
    """Returns the ids of the prompt that `plan` would make. Raises `ApiError`."""
    fields, _ = await common.aside(request, chat.read, value)
    model = common.served_model(request, fields.model)
    tools = await tools_of(request, fields)
    return (await encoded(request, model, fields, tools, None)).tokens


def _budget(fields: chat.ChatFields, model: ServedModel) -> int | None:
    """Returns the most tokens of the reasoning; None for no bound. Raises `ApiError` 400."""
    name = "reasoning_budget" if fields.thinking_token_budget is None else "thinking_token_budget"
    budget: int | None = getattr(fields, name)
    if budget is not None and model.end_of_thought is None:
        raise errors.invalid(
            f"'{name}' needs a model that ends its reasoning with one token.", name, "unsupported_parameter"
        )
    return budget


def _unwanted(tools: Tools, model: ServedModel, form: Form | None) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens that begin calls, where tools are offered and none may be called. A grammar has none of them."""
    if not tools.functions or tools.may_call or form is not None:
        return ()
    return tuple((token,) for token in model.call_marks)


def rules(fields: SamplingFields) -> TextRules:
    return TextRules(
        stops=StopStrings(fields.stops) if fields.stops else None,
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        min_tokens=fields.min_tokens or 0,
        shows_tokens=fields.num_logprobs >= 0 or bool(fields.return_token_ids),
    )


ROUTES = [Route("POST", "/v1/chat/completions", create, "chat", takes=chat.ChatFields)]
