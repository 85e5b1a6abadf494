"""Chat templates: the model's own, in a sandbox, within a time limit. A template that a client sent is never used.

The environment is the one that models' authors test against (transformers' `apply_chat_template`), rebuilt here because
the gateway does not import transformers.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from gateway.schema.chat import TurnForm

MAX_RENDER_S = 1.0
"""The longest render in the thread's own processor time, so that a busy machine does not count against the messages."""
MAX_RENDERED_CHARS = 64 * 1024 * 1024


GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that are not a client's to set."""
NO_SWITCHES: Mapping[str, Any] = MappingProxyType({})


class TemplateRefused(Exception):
    """The template itself does not take these messages; the text is the model's, not ours."""


class _Generation(jinja2.ext.Extension):
    """A tag: `{% generation %}…{% endgeneration %}` marks training targets; rendering it gives its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses names that reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a namespace attribute begins with an underscore")


def _refuse(message: str) -> None:
    raise TemplateRefused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _assigned(tree: jinja2.nodes.Template) -> set[str]:
    """Returns the names that a template sets by itself, except those that it first asks for (`is defined`)."""
    asked = {
        test.node.name
        for test in tree.find_all(jinja2.nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, jinja2.nodes.Name)
    }
    return {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "store"} - asked


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # noqa: DTZ005 (local time, as templates expect)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    return environment


_SHORT_IDS = re.compile(r"length\s*!=\s*9")
"""The check of Mistral's templates, which take ids of nine letters and digits."""
_PROBED = re.compile(r'"probe": ?"value"|<parameter=probe>|<arg_key>probe|probe="value"|probe:<\|"\|>value')


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        """Compiles a template. `variables` are the values of the tokenizer that the template may name, such as
        `bos_token`. Raises `ValueError`.
        """
        self.source = source
        self._variables = dict(variables or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(
                self._template.globals
            )  # each rendering copies the chain of maps, item by item
            tree = environment.parse(source)
            used = jinja2.meta.find_undeclared_variables(tree)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        own = (
            _assigned(tree)
            | {name for name in used if name.endswith("_token")}
            | set(environment.globals)
            | set(self._variables)
        )
        self.knows_tools = "tools" in used
        self.switches = frozenset(used) - GIVEN - own
        """Names of the variables that a request may set."""
        self.turns = self._turns()

    @functools.cached_property
    def example(self) -> str:
        """The prompt of one short question; empty if the template refuses it."""
        try:
            return self.render([{"role": "user", "content": "question"}])
        except TemplateRefused:
            return ""

    @functools.cached_property
    def _late_role(self) -> str:
        """The role of a system message that follows others: the user's where the template refuses or drops it."""
        user, assistant, late = _turn("user", "question"), _turn("assistant", "answer"), _turn("system", "late text")
        is_taken = self._shows([user, late]) and self._shows([user, assistant, late, user])
        return "system" if is_taken else "user"

    @functools.cached_property
    def _joined_roles(self) -> frozenset[str]:
        """The roles of which the template does not take two messages in a row, or drops one of them."""
        systems, users = ([_turn(role, "first text"), _turn(role, "second text")] for role in ("system", "user"))
        probes = {"system": [*systems, _turn("user", "question")], "user": users}
        return frozenset(role for role, probe in probes.items() if not self._shows(probe))

    def _shows(self, messages: list[dict[str, Any]]) -> bool:
        """Returns whether the content of each of these messages reaches the prompt."""
        try:
            rendered = self.render(messages)
        except TemplateRefused:
            return False
        return all(message["content"] in rendered for message in messages)

    def in_taken_roles(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with roles in an order that the template takes. A late system message becomes the user's,
        and neighbours of one role become one message, each only where the template does not take them.
        """
        begun = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        late = [one | {"role": self._late_role} if one["role"] == "system" else one for one in messages[begun:]]
        made: list[dict[str, Any]] = []
        for role, neighbours in itertools.groupby([*messages[:begun], *late], key=lambda message: message["role"]):
            first, *others = neighbours
            if others and role in self._joined_roles:
                contents = [message["content"] for message in (first, *others) if message["content"]]
                made.append(first | {"content": "\n\n".join(contents)})
            else:
                made += [first, *others]
        return made

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        switches: Mapping[str, Any] = NO_SWITCHES,
        clock: Any = time.thread_time,
    ) -> str:
        """Renders messages. `switches` are values for names of `self.switches`. Raises `TemplateRefused` when the
        template refuses, fails, or takes too long.
        """
        deadline = clock() + MAX_RENDER_S
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                **self._variables,
                **switches,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if clock() > deadline or num_chars > MAX_RENDERED_CHARS:
                    raise TemplateRefused("The messages take too long to render.")
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ):
            raise TemplateRefused("The model's chat template does not accept these messages.") from None
        return "".join(pieces)

    def render_open(self, messages: list[dict[str, Any]], **how: Any) -> str:
        """Renders messages up to the end of the last one's content, for an answer that continues it. `how` is as in
        `render`. Raises `TemplateRefused`, also where the template does not show that content.
        """
        mark = secrets.token_hex(16)
        *others, last = messages
        rendered = self.render([*others, last | {"content": (last["content"] or "") + mark}], **how)
        end = rendered.rfind(mark)
        if end < 0:
            raise TemplateRefused("The model's chat template does not show the last message as it is.")
        return rendered[:end]

    def _turns(self) -> TurnForm:
        """Finds how the template wants tool calls in messages, by rendering one in each way."""
        has_short_ids = _SHORT_IDS.search(self.source) is not None
        for as_objects in (True, False):
            for null_content in (True, False):
                form = TurnForm(as_objects, null_content, has_short_ids)
                try:
                    rendered = self.render(_probe(form), tools=[])
                except TemplateRefused:
                    continue
                if _PROBED.search(rendered):
                    return form
        return TurnForm(has_short_ids=has_short_ids)


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _probe(form: TurnForm) -> list[dict[str, Any]]:
    """Returns a conversation with one tool call."""
    arguments = {"probe": "value"} if form.as_objects else '{"probe": "value"}'
    call = {"id": "123456789", "type": "function", "function": {"name": "probed", "arguments": arguments}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None if form.null_content else "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "123456789", "name": "probed"},
    ]


def load_template(directory: Path) -> ChatTemplate | None:
    """Reads `chat_template.jinja`, otherwise `tokenizer_config.json`, otherwise `chat_template.json`, where models that
    take images have it. Returns None if the model has no template.
    """
    config = _json(directory / "tokenizer_config.json")
    file = directory / "chat_template.jinja"
    source = file.read_text() if file.is_file() else config.get("chat_template")
    source = source or _json(directory / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # if there are several named templates, the default is used
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        return None
    return _compiled(source, tuple(sorted(_special_tokens(config, directory).items())))


@functools.lru_cache(8)
def _compiled(source: str, variables: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Compiles a template once for all models that have it, and not again when they are read again."""
    return ChatTemplate(source, dict(variables))


def _special_tokens(config: dict[str, Any], directory: Path) -> dict[str, str]:
    found = {**_json(directory / "special_tokens_map.json"), **config}
    values = {name: _content(value) for name, value in found.items() if name.endswith("_token")}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _content(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
