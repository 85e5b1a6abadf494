"""The models that this gateway serves: their text becomes token ids, and a key finds those that it may use.

`gateway/generation/served/model_files.py` reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
from aiohttp import web

from accounting.tenants.adapters import AdapterInfo
from accounting.values.types import Principal
from gateway.base import errors
from gateway.base.settings import ModelSource
from gateway.intake.json_body import MAX_VALUES
from gateway.parsers.dialects import OutputSyntax
from gateway.schema.chat import broken_up, template_messages
from gateway.schema.sampling import Defaults
from gateway.schema.tools import NO_TOOLS, Tools
from gateway.text.templates import NO_SWITCHES, ChatTemplate, TemplateRefused
from gateway.text.tokenizer import ModelTokenizer, TooManyTokens, count_bytes
from gateway.text.tool_prompt import in_words
from gateway.text.volatile import VolatileLine, VolatilePart, steady, volatile_lines
from gateway.upstreams.wires.values import Counter

MAX_VOLATILE_CHARS = 32 * 1024
"""Volatile lines are blamed for a miss only within this number of characters of a prompt."""
MAX_TOKENS = MAX_VALUES
"""The bound on the tokens of one text, whatever the context. No more tokens are turned into Python objects."""


class ChatPrompt(msgspec.Struct, frozen=True):
    tokens: array[int]
    is_thinking: bool
    """Whether the prompt has opened the reasoning, which the output then begins with."""
    volatile: Sequence[VolatilePart] = ()
    """The volatile lines of its system prompt, which a miss of the cache may be due to."""


@dataclass(frozen=True)
class ServedModel:
    id: str
    tokenizer: ModelTokenizer
    template: ChatTemplate | None
    max_model_len: int
    """The positions that the model's own configuration allows. A worker may have fewer."""
    max_output_tokens: int | None
    defaults: Defaults
    created: int
    end_ids: tuple[int, ...] = ()
    """The model's own tokens that end a text."""
    base: str = ""
    """The id of the base model, if this model is an adapter."""
    adapter: str = ""
    """The adapter's name on the workers."""
    syntax: OutputSyntax = field(default_factory=OutputSyntax)
    """The way in which the model writes tool calls and reasoning."""
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    """The names of the models that are tried when no worker of this one can answer."""
    instead_of: str = ""
    """The name of the model that was asked for, if this one answers as its fallback."""
    source: ModelSource | None = None
    """The settings that it was read by."""
    is_foreign: bool = False
    """Servers of others alone answer for it, so nobody here knows its token ids."""
    counter: Counter | None = None
    """Counts tokens of a text by the model's own tokenizer; None for a foreign model without one."""

    @property
    def on_workers(self) -> str:
        """The id under which workers serve this model."""
        return self.base or self.id

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The kinds of request that the model takes, as `/v1/models` names them."""
        return ("completions",) if self.template is None else ("completions", "chat")

    def encode_chat(self, messages: list[Any]) -> array[int]:
        """Renders and tokenizes messages. Runs in a thread. Raises `ApiError` 400."""
        return self.chat_prompt(messages).tokens

    def chat_prompt(
        self,
        messages: list[Any],
        tools: Tools = NO_TOOLS,
        switches: Mapping[str, Any] = NO_SWITCHES,
        add_generation_prompt: bool = True,
        *,
        continues: bool = False,
        add_special_tokens: bool = False,
        is_cut: bool = False,
        moves_volatile: bool = False,
    ) -> ChatPrompt:
        """Renders and tokenizes a conversation with its tools. If it `continues`, the text ends with the last message,
        which stays open; `is_cut` if the prompt may be too long, because it is shortened afterwards; if
        `moves_volatile`, volatile lines of the system prompt are put after what the cache can serve. Runs in a thread.
        Raises `ApiError` 400.
        """
        template, break_up = self._need_template(), self.tokenizer.break_up
        plain = template_messages(messages, break_up, template.turns)
        volatile = [] if moves_volatile else volatile_lines(plain)
        plain = steady(plain) if moves_volatile else plain
        offered = [broken_up(tool, break_up) for tool in tools.plain()] or None
        if not is_cut:
            of_texts = sum(count_bytes(message["content"] or "") for message in plain)
            self.check_bytes(of_texts + len(msgspec.json.encode(offered)), "messages")
        if offered and not template.knows_tools:
            plain, offered = in_words(plain, offered), None
        plain = template.in_taken_roles(plain)
        try:
            render = template.render_open if continues else template.render
            rendered = render(
                plain,
                tools=offered,
                add_generation_prompt=add_generation_prompt and not continues,
                switches=broken_up(dict(switches), break_up),
            )
        except TemplateRefused as refusal:
            raise errors.invalid(str(refusal)[:200], "messages") from None
        with self._bounded("messages") as most:
            tokens = array("i", self.tokenizer.encode_rendered(rendered, most, add_special_tokens))
        is_thinking = (add_generation_prompt or continues) and self.syntax.is_open_after(rendered)
        return ChatPrompt(tokens, is_thinking, self._placed(volatile, rendered))

    def _placed(self, lines: Sequence[VolatileLine], rendered: str) -> list[VolatilePart]:
        """Returns where volatile lines stand among the tokens of a prompt."""
        parts: list[VolatilePart] = []
        for line in lines:
            start = rendered.find(line.text, 0, MAX_VOLATILE_CHARS)
            if start >= 0:
                ends = (rendered[:start], rendered[: start + len(line.text)])
                parts.append(VolatilePart(line.kind, *(len(self.tokenizer.encode_rendered(end)) for end in ends)))
        return sorted(parts, key=lambda part: part.start)

    @cached_property
    def special_marks(self) -> Mapping[str, int]:
        """The ids of those marks of the model's syntax that are special tokens."""
        return self.tokenizer.special_of(self.syntax.marks)

    @cached_property
    def marks_without_tools(self) -> frozenset[int]:
        """The special tokens that the parser of a request without tools looks for."""
        return self.marks_read(NO_TOOLS)

    def marks_read(self, tools: Tools) -> frozenset[int]:
        """Returns the special tokens that the parser of a request looks for."""
        return frozenset(self.tokenizer.special_of(self.syntax.read_marks(tools)).values())

    @cached_property
    def end_of_thought(self) -> int | None:
        """The token that ends the reasoning, or None for a model without one."""
        end = self.syntax.end_of_thought
        return self.tokenizer.id_of(end) if end else None

    @cached_property
    def call_marks(self) -> tuple[int, ...]:
        """The single tokens that begin a call."""
        spelling = self.syntax.dialect.spelling
        first = spelling.first + spelling.before
        marks = [mark for mark in self.syntax.dialect.marks if first.startswith(mark)]
        ids = (self.tokenizer.id_of(mark) for mark in marks if not self.syntax.dialect.has_channels)
        return tuple(number for number in ids if number is not None)

    @property
    def switches(self) -> frozenset[str]:
        """Names of the variables of the template that a request may set."""
        return self._need_template().switches

    def _need_template(self) -> ChatTemplate:
        self._refuse_foreign("messages")
        if self.template is None:
            raise errors.invalid("This model has no chat template: use /v1/completions.", "messages")
        return self.template

    def _refuse_foreign(self, param: str) -> None:
        if self.is_foreign:
            raise errors.invalid(
                "Nobody here knows the tokens of this model: its provider counts them.", param, "unsupported_parameter"
            )

    def encode_text(
        self, text: str, add_special_tokens: bool = True, param: str = "prompt", *, is_cut: bool = False
    ) -> array[int]:
        """Tokenizes text, which stands in the field `param`; `is_cut` if it may be too long, because it is shortened
        afterwards. Runs in a thread. Raises `ApiError` 400.
        """
        self._refuse_foreign(param)
        if not is_cut:
            self.check_bytes(count_bytes(text), param)
        with self._bounded(param) as most:
            return array("i", self.tokenizer.encode_plain(text, add_special_tokens, most))

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the ids of each word, both as it begins a text and as it follows a space. Runs in a thread. Raises
        `ApiError` 400.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            for text in (bare, f" {bare}") if bare else (word,):
                ids = tuple(self.tokenizer.encode_plain(text, add_special_tokens=False))
                if not ids:
                    raise errors.invalid("A word has no tokens.", "bad_words")
                found[ids] = None
        # A sequence that ends with another banned sequence is already banned by that one.
        return tuple(ids for ids in found if not any(ids[i:] in found for i in range(1, len(ids))))

    @contextlib.contextmanager
    def _bounded(self, param: str) -> Iterator[int]:
        try:
            yield max(self.max_model_len, MAX_TOKENS)
        except TooManyTokens as found:
            raise context_exceeded(self.max_model_len, found.num_tokens, 0, param) from None

    def check_bytes(self, num_bytes: int, param: str) -> None:
        """A prompt that is certainly too long is refused before it costs a tokenization."""
        at_least = num_bytes // self.tokenizer.max_bytes_per_token
        if at_least > self.max_model_len:
            raise context_exceeded(self.max_model_len, f"at least {at_least}", 0, param)


def kept_prompt(
    model: ServedModel, max_len: int, prompt: array[int], asked: int | None, keep: int | None, side: str | None
) -> array[int]:
    """Returns the prompt with at most `keep` tokens: None keeps all, -1 as many as fit with an output of `asked`. The
    end stays unless `side` is "right".
    """
    if keep == -1:
        keep = max(1, max_len - max(1, asked or model.max_output_tokens or 1))
    if keep is None or len(prompt) <= keep:
        return prompt
    return prompt[:keep] if side == "right" else prompt[-keep:]


def context_exceeded(limit: int, num_prompt: int | str, num_output: int, param: str) -> errors.ApiError:
    asked = f"{num_prompt} in the prompt" + (f", {num_output} for the output" if num_output else "")
    message = f"This model's maximum context length is {limit} tokens. You asked for {asked}."
    error = errors.invalid(message, param, "context_length_exceeded")
    return replace(error, too_many_tokens=(num_prompt, limit - min(1, num_output)))


def output_bound(
    model: ServedModel,
    max_len: int,
    num_prompt: int,
    asked: int | None,
    param: str,
    least: int = 0,
    *,
    cut: bool = False,
) -> int:
    """Returns the number of tokens that each choice may have. Raises `ApiError` 400 for a request that does not fit: it
    is never cut silently, but with `cut` down to the room that there is. `least` is the smallest number of tokens of an
    answer.
    """
    if cut and asked:
        room = max(1, max_len - num_prompt)
        asked = min(asked, room if model.max_output_tokens is None else min(room, model.max_output_tokens))
    bound = _output_bound(model, max_len, num_prompt, asked, param)
    if least > bound:
        raise errors.invalid(f"An answer of at least {least} tokens cannot have at most {bound}.", "min_tokens")
    return bound


def _output_bound(model: ServedModel, max_len: int, num_prompt: int, asked: int | None, param: str) -> int:
    room = max_len - num_prompt
    if room < 1 and asked != 0:
        raise context_exceeded(max_len, num_prompt, asked or 1, param)
    if asked is None:
        return room if model.max_output_tokens is None else min(room, model.max_output_tokens)
    if asked > room:
        raise context_exceeded(max_len, num_prompt, asked, param)
    if model.max_output_tokens is not None and asked > model.max_output_tokens:
        raise errors.invalid(f"This model gives at most {model.max_output_tokens} tokens.", "max_tokens")
    return asked


class Models:
    """The served models, by served id."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._foreign: dict[str, ServedModel] = {}
        self._registered: Sequence[AdapterInfo] = ()
        """The adapters, also those of models that are not served now."""
        self.serve(models)

    def serve(self, models: Mapping[str, ServedModel]) -> None:
        """Serves exactly these models from now on, with their adapters. Requests that run keep the model that they began
        with.
        """
        self._models = dict(models)
        self._targets = {alias: model.id for model in models.values() for alias in model.aliases}
        self.serve_adapters(self._registered)

    def serve_foreign(self, models: Mapping[str, ServedModel]) -> None:
        """Serves exactly these models of others from now on. A model of our own with the same name comes first."""
        self._foreign = dict(models)

    def serve_adapters(self, infos: Sequence[AdapterInfo]) -> None:
        """Serves exactly these adapters from now on, those of served models."""
        self._registered = infos
        self._adapters: dict[str, tuple[str | None, ServedModel]] = {
            info.served_id: (
                info.tenant_id,
                replace(base, id=info.served_id, base=base.id, adapter=info.id, created=info.created_at),
            )
            for info in infos
            if (base := self._models.get(info.model)) is not None
        }
        """Served id → (the tenant that it serves, or None for all; the model with the adapter)."""

    @property
    def served(self) -> Mapping[str, ServedModel]:
        return self._models

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the served models of our own, without adapters."""
        return tuple(self._models)

    @property
    def vocabularies(self) -> Mapping[str, str]:
        """The digests of the vocabularies of the served models of our own, by id."""
        return {name: model.tokenizer.vocabulary for name, model in self._models.items()}

    @property
    def foreign_ids(self) -> tuple[str, ...]:
        """The ids of the models that upstreams alone answer for."""
        return tuple(name for name in self._foreign if name not in self._models)

    @property
    def names(self) -> list[str]:
        """The ids of all served models, with adapters of every tenant, and without aliases."""
        return sorted({*self._models, *self._foreign, *self._adapters})

    def base(self, name: str) -> ServedModel:
        """Returns a model without an adapter. Raises `ApiError` 404."""
        if name not in self._models:
            raise errors.model_not_found()
        return self._models[name]

    def get(self, name: str, principal: Principal) -> ServedModel:
        """Returns a model or adapter. Raises `ApiError` 404, also for another tenant's adapter, or 403 for a model that
        the key may not use.
        """
        model = self._models.get(self._targets.get(name, name)) or self._adapter(name, principal.tenant_id)
        model = model or self._foreign.get(name)
        if model is None:
            raise errors.model_not_found()
        if not _may_use(principal, model):
            raise _not_allowed()
        return model

    def refuse(self, name: str, principal: Principal) -> None:
        """Raises `ApiError` 403 for a name that the key may not use, whether it is served now or not."""
        try:
            self.get(name, principal)
        except errors.ApiError as refusal:
            if refusal.status == 403 or not principal.may_use(name):
                raise _not_allowed() from None

    def fallbacks(self, model: ServedModel, principal: Principal) -> Iterator[ServedModel]:
        """Yields the models that may answer in place of this one, in order, as far as the key may use them."""
        for name in model.fallbacks:
            other = self._models.get(name) or self._foreign.get(name)
            if other is not None and _may_use(principal, other):
                yield replace(other, instead_of=model.id)

    def visible(self, principal: Principal) -> Sequence[ServedModel]:
        own = (self._adapter(name, principal.tenant_id) for name in self._adapters)
        foreign = (model for name, model in self._foreign.items() if name not in self._models)
        found = [*self._models.values(), *foreign, *(model for model in own if model is not None)]
        return [model for model in found if _may_use(principal, model)]

    def _adapter(self, name: str, tenant_id: str) -> ServedModel | None:
        owner, model = self._adapters.get(name, (None, None))
        return model if owner is None or owner == tenant_id else None


def _not_allowed() -> errors.ApiError:
    return errors.forbidden("model_not_allowed", "This API key may not use this model.")


def _may_use(principal: Principal, model: ServedModel) -> bool:
    """A denied model is denied with every adapter. An allowed model allows only the names that are listed."""
    return principal.may_use(model.id) and model.base not in principal.denied_models


def fingerprint(root: str) -> str:
    """Returns `system_fingerprint`. It changes with weights, tokenizer and KV format, and reveals nothing of them."""
    return "fp_" + hashlib.blake2b(root.encode(), digest_size=6).hexdigest()


MODELS = web.AppKey("models", Models)
