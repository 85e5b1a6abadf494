"""The grammar of an output whose calls are enforced: reasoning, then calls or a text, as the model's dialect writes them.

Calls are enforced where the client demands one, and for tools that are `strict`. Everything else stays free: a grammar
then begins only with the mark of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.base import errors
from gateway.parsers.dialects import OutputSyntax
from gateway.schema.custom_tools import INPUT, arguments_of
from gateway.schema.tools import FunctionTool, Tools
from gateway.structured import check
from gateway.structured.document import ANY_OBJECT, Document, Node, types
from gateway.structured.form import Form, document_of, too_deep
from gateway.structured.lark import of_own, schema_text

MAX_CHARS = 256 * 1024
"""The longest grammar of all schemas together."""
_TEXT = "TEXT: /(.|\\n)*/"
_BREAKS = "/\\n{0,2}/"


class Wanted(msgspec.Struct, frozen=True):
    """The demands on an output."""

    syntax: OutputSyntax
    tools: Tools
    answer: Form | None
    """The form of a text, if the client wants one."""
    is_thinking: bool
    """Whether the prompt has opened the reasoning."""
    special: Mapping[str, int]
    """The ids of those marks that are special tokens: a grammar names them by id."""
    budget: int | None = None
    """The most tokens of the reasoning, without its tags. The mark that ends the reasoning is one token then."""
    end_of_thought: int | None = None
    """The id of that token."""

    @property
    def is_free(self) -> bool:
        """Whether nothing is enforced."""
        tools = self.tools
        is_strict = any(tool.strict for tool in tools.callable) and tools.may_call
        return self.answer is None and self.budget is None and not tools.is_forced and not is_strict


def form_of(wanted: Wanted) -> Form | None:
    """Returns the form of the whole output, or None if nothing is enforced. Raises `ApiError` 400 for schemas that
    cannot be enforced. May take 100 ms for each large schema.
    """
    tools, answer = wanted.tools, wanted.answer
    if wanted.is_free:
        return None
    documents = _documents(tools)
    has_head = wanted.syntax.style is not None or wanted.syntax.dialect.has_channels
    if answer is not None and not tools.may_call and not has_head:
        return answer
    grammar = _Writer(wanted, documents).grammar()
    if len(grammar) > MAX_CHARS:
        raise errors.invalid(
            f"The schemas of the tools make a grammar of more than {MAX_CHARS // 1024} KiB.",
            "tools",
            "unsupported_schema",
        )

    def keeps_call(name: str, arguments: str) -> bool:
        if name in tools.custom:
            arguments = arguments_of(arguments)
        return name not in documents or check.is_valid(documents[name], arguments)

    return Form(grammar, answer.is_kept if answer else lambda text: True, keeps_call)


def _documents(tools: Tools) -> dict[str, Document]:
    """Returns the schemas that are enforced, by name: all that may be called if a call is forced, else the strict ones."""
    return {
        function.name: _arguments(_place(i, function, tools), function)
        for i, function in enumerate(tools.functions)
        if function.name in tools.allowed and (tools.is_forced or (function.strict and tools.may_call))
    }


def _place(index: int, function: FunctionTool, tools: Tools) -> str:
    """Returns the place in the body that the schema of a tool comes from."""
    return f"tools[{index}]." + ("custom.format" if function.name in tools.custom else "function.parameters")


def _arguments(where: str, function: FunctionTool) -> Document:
    if function.parameters is None:
        return document_of({"type": "object", "properties": {}}, where)
    document = document_of(function.parameters, where)
    if document.root is True:
        return Document(ANY_OBJECT)
    try:
        is_object = _Objects(document).has(document.root)
    except RecursionError:
        raise too_deep(where) from None
    if not is_object:
        raise errors.invalid("The parameters of a function must be an object.", where, "unsupported_schema")
    return document


class _Objects:
    """Says of the nodes of a document whether all of their values are objects. Each node is looked at once: references
    that lead to one node on many ways are not followed on each of them.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self._known: dict[int, bool] = {}

    def has(self, node: Node) -> bool:
        node = self._document.followed(node)
        if id(node) not in self._known:
            self._known[id(node)] = self._look(node)
        return self._known[id(node)]

    def _look(self, node: Node) -> bool:
        if node is True or "enum" in node:
            return False
        if "anyOf" in node:
            return all(map(self.has, node["anyOf"]))
        if "allOf" in node:
            return any(map(self.has, node["allOf"]))
        return types(node) == ("object",)


class _Writer:
    """The writer of one grammar, rule by rule."""

    def __init__(self, wanted: Wanted, documents: Mapping[str, Document]) -> None:
        self._wanted = wanted
        self._documents = documents
        self._spelling = wanted.syntax.dialect.spelling
        self._rules: list[str] = [_TEXT]

    def grammar(self) -> str:
        channels = self._wanted.syntax.dialect.has_channels
        body = self._messages() if channels else f"{self._thought()} {self._answer()}"
        return "\n".join((f"start: {body.strip()}", *self._rules, ""))

    # Reasoning

    def _thought(self) -> str:
        style = self._wanted.syntax.style
        if style is None:
            return ""
        if self._wanted.budget is None:
            self._until("thought", style.close)
        else:
            self._at_most("thought", style.close)
        if self._wanted.is_thinking:
            return f"thought {_BREAKS}"
        return f"(/\\n?/ {self._literal(style.open)} thought {_BREAKS})?"

    def _messages(self) -> str:
        """Returns the body of an output in channels: any reasoning and remarks, then a call or the final message."""
        self._until("message", "<|end|>")
        if self._wanted.budget is not None:
            self._at_most("thought", "<|end|>")
        for channel, inner in (
            ("analysis", "thought" if self._wanted.budget is not None else "message"),
            ("commentary", "message"),
        ):
            head = self._literal(f"<|channel|>{channel}<|message|>")
            self._rules.append(f"{channel}: {head} {inner} {self._literal('<|start|>assistant')}")
        bodies = []
        if self._wanted.tools.may_call:
            bodies.append(self._one_call())
        if not self._wanted.tools.is_forced:
            bodies.append(f"{self._literal('<|channel|>final<|message|>')} {self._text()}")
        before = "(analysis | commentary)*" if self._wanted.budget is None else "analysis? commentary*"
        return f"{before} ({' | '.join(bodies)})"

    # The answer

    def _answer(self) -> str:
        tools = self._wanted.tools
        if tools.is_forced:
            return self._calls()
        if not tools.may_call:
            return self._text()
        if self._wanted.answer is None:
            return f"({self._free()})"
        if self._mark():
            return f"({self._text()} | {self._calls()})"
        return f"({self._text()} | {self._json_call()})"

    def _text(self) -> str:
        answer = self._wanted.answer
        if answer is None:
            return self._begin()
        self._rules.append(answer.grammar.replace("start:", "answer:", 1).rstrip())
        return "answer"

    def _free(self) -> str:
        """Returns a text in which calls may stand; without a mark, a text or calls alone."""
        mark = self._mark()
        if not mark:
            return f"/([^ \\n\\[{{](.|\\n)*)?/ | {self._calls()}"
        self._until("marked", mark, self._begin())
        times = "+" if self._wanted.tools.parallel else ""
        return f"{self._begin()} | (marked {self._calls(mark)}){times} TEXT"

    def _mark(self) -> str:
        """Returns the mark that begins calls, or "" in a dialect without one."""
        first = self._spelling.first + self._spelling.before
        return max((mark for mark in self._wanted.syntax.dialect.marks if first.startswith(mark)), key=len, default="")

    def _json_call(self) -> str:
        """Returns the rule of one call as one JSON value. The library tells it from another JSON value; it could not
        tell a call that begins with fixed text.
        """
        if self._wanted.tools.grammars:
            raise errors.invalid(
                "This model's calls have no mark, so a form of the answer and a Lark grammar of a tool cannot be told apart.",
                "response_format",
                "unsupported_schema",
            )
        calls: list[dict[str, Any]] = []
        named: dict[str, Node] = {}
        for i, function in enumerate(self._wanted.tools.callable):
            document = self._documents.get(function.name, Document(ANY_OBJECT)).renamed(f"{i}.")
            known = {"name": {"enum": [function.name]}, "parameters": document.root}
            calls.append(
                {"type": "object", "properties": known, "required": list(known), "additionalProperties": False}
            )
            named |= document.named
        self._rules.append(f"call: {schema_text({'anyOf': calls, '$defs': named})}")
        return "call"

    def _calls(self, mark: str = "") -> str:
        """Returns the rule of one or more calls, behind a `mark` that was read. A mark in front of each call begins
        only one.
        """
        spelling = self._spelling
        calls = self._one_call("" if spelling.first else mark)
        if self._wanted.tools.parallel and (spelling.first or not mark):
            calls += f" ({self._literal(spelling.separator)} call)*"
        return f"{self._literal(spelling.first.removeprefix(mark))} {calls} {self._literal(spelling.last)}".strip()

    def _one_call(self, mark: str = "") -> str:
        """Returns the name of the rule of one call of any allowed tool, without the `mark` in front of it."""
        spelling, names = self._spelling, []
        for i, function in enumerate(self._wanted.tools.callable):
            head = (spelling.before + function.name + spelling.between).removeprefix(mark)
            self._rules.append(f"call{i}: {self._literal(head)} arguments{i} {self._literal(spelling.after)}".rstrip())
            self._add_arguments(i, function)
            names.append(f"call{i}")
        self._rules.append(f"call: {' | '.join(names)}")
        return "call"

    def _add_arguments(self, i: int, function: FunctionTool) -> None:
        """Adds the rule of the arguments of a tool, which are one JSON object."""
        grammar = self._wanted.tools.grammars.get(function.name)
        if grammar is None or function.name not in self._documents:
            document = self._documents.get(function.name, Document(ANY_OBJECT))
            self._rules.append(f"arguments{i}: {schema_text(document.whole())}")
            return
        start, rules = of_own(grammar, f"own{i}")
        self._rules.append(f'arguments{i}: /\\{{"{INPUT}": ?"/ {start} /"\\}}/')
        self._rules += rules

    # Terminals

    def _until(self, name: str, mark: str, text: str = "TEXT") -> None:
        """Adds a rule of any text up to a mark."""
        option = "" if mark in self._wanted.special else "[lazy]"
        self._rules.append(f"{name}{option}: {text} {self._literal(mark)}")

    def _begin(self) -> str:
        """Returns the terminal of a text that does not begin as reasoning, which would else escape its rules."""
        style = self._wanted.syntax.style
        if style is None or self._wanted.is_thinking or self._wanted.syntax.dialect.has_channels:
            return "TEXT"
        rule = f"BEGIN: /(.|\\n)*/ & ~/\\n?{_escaped(style.open)}(.|\\n)*/"
        if rule not in self._rules:
            self._rules.append(rule)
        return "BEGIN"

    def _at_most(self, name: str, mark: str) -> None:
        """Adds a rule of any text within the budget up to a mark that is one token."""
        end = f"<[{self._wanted.end_of_thought}]>"
        if not self._wanted.budget:
            self._rules.append(f"{name}: {end}")
            return
        self._rules.append(f"{name}: within {end}")
        self._rules.append(f"within[max_tokens={self._wanted.budget}]: OTHER")
        self._rules.append(f"OTHER: /(.|\\n)*/ & ~/(.|\\n)*{_escaped(mark)}(.|\\n)*/")

    def _literal(self, text: str) -> str:
        """Returns a fixed text, in which special tokens stand by their ids."""
        special = self._wanted.special
        marks = "|".join(re.escape(mark) for mark in sorted(special, key=len, reverse=True))
        pieces = re.split(f"({marks})", text) if special else [text]
        return " ".join(_quoted(piece, special) for piece in pieces if piece)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _quoted(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)
