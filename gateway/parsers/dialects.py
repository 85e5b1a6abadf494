"""The dialects in which models write tool calls and reasoning: what reads each, what marks it, and how a call is spelled.

A model's dialect is recognised by its chat template, and may be set by the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from gateway.parsers import gemma, harmony, invoked, llama, marked, tagged, thinking
from gateway.parsers.gemma import GemmaMarks
from gateway.parsers.invoked import InvokeTags
from gateway.parsers.parts import MakeParser
from gateway.parsers.plain import PlainText
from gateway.parsers.scan import Format, Parser, Scan, Wait
from gateway.parsers.thinking import Thinking
from gateway.schema.tools import Tools


@dataclass(frozen=True)
class Spelling:
    """The way in which calls are written where a grammar forces them. The parser of the dialect reads it."""

    before: str
    """The text in front of the name."""
    between: str
    """The text between name and arguments."""
    after: str
    separator: str = ""
    first: str = ""
    """The text in front of the first call."""
    last: str = ""
    """The text after the last call."""


_JSON = Spelling('{"name": "', '", "arguments": ', "}", ", ")
HERMES = Spelling('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")


@dataclass(frozen=True)
class Dialect:
    """A dialect of tool calls."""

    read: Format
    spelling: Spelling
    marks: tuple[str, ...] = ()
    """The marks that may be special tokens of a model."""
    has_channels: bool = False
    """Whether each message of the output has a header, so that reasoning and text are read by this dialect, too."""


_TAGS = (tagged.OPEN, tagged.CLOSE)
_XML = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _listed(first: str, last: str = "") -> Spelling:
    return Spelling(_JSON.before, _JSON.between, _JSON.after, _JSON.separator, f"{first}[", f"]{last}")


def _list(marks: tuple[str, str], calls: Format | None = None) -> Dialect:
    """Returns a dialect whose calls are a list between two marks."""
    return Dialect(calls or marked.listed(marks), _listed(*marks), tuple(filter(None, marks)))


def _tagged(tags: tuple[str, str], also: tuple[str, ...] = ()) -> Dialect:
    begin, end = tags
    spelling = Spelling(f'{begin}\n{{"name": "', HERMES.between, f"}}\n{end}", HERMES.separator)
    return Dialect(tagged.reader(*tags), spelling, (*tags, *also))


def _invoked(tags: InvokeTags) -> Dialect:
    begin, end = tags.blocks[0]
    spelling = Spelling(tags.invoke, '">\n', f"\n{tags.invoke_end}", "\n", f"{begin}\n", f"\n{end}")
    blocks = [tag for block in tags.blocks for tag in block]
    return Dialect(invoked.reader(tags), spelling, (*blocks, *filter(None, (tags.mark,))))


def _gemma(marks: GemmaMarks) -> Dialect:
    spelling = Spelling(f"{marks.open}call:", "", marks.close)
    return Dialect(gemma.reader(marks), spelling, (marks.open, marks.close, marks.quote))


def _sections(marks: marked.Marks, prefix: str = "") -> Spelling:
    return Spelling(marks.call + prefix, marks.between, marks.call_end, "", marks.section, marks.section_end)


def _marks(marks: marked.Marks) -> tuple[str, ...]:
    return (marks.section, marks.call, marks.between, marks.call_end, marks.section_end)


DIALECTS: Mapping[str, Dialect] = {
    "hermes": _tagged(_TAGS),
    "qwen3_coder": _tagged(_TAGS),
    "glm": _tagged(_TAGS, _XML),
    "seed_oss": _tagged(tagged.SEED),
    "longcat": _tagged(tagged.LONGCAT),
    "llama": Dialect(llama.llama, Spelling('{"name": "', '", "parameters": ', "}", "; "), (*llama.MARKS, llama.END)),
    "pythonic": Dialect(llama.llama, _listed(""), (*llama.MARKS, llama.END)),
    "mistral": Dialect(marked.mistral, _listed(marked.TOOL_CALLS), (marked.TOOL_CALLS, "[ARGS]", "[CALL_ID]")),
    "mistral_named": Dialect(
        marked.mistral, Spelling(marked.TOOL_CALLS, "[ARGS]", ""), (marked.TOOL_CALLS, "[ARGS]", "[CALL_ID]")
    ),
    "deepseek": Dialect(
        marked.deepseek,
        Spelling(
            f"{marked.DEEPSEEK.call}function{marked.DEEPSEEK.between}",
            "\n```json\n",
            f"\n```{marked.DEEPSEEK.call_end}",
            "\n",
            marked.DEEPSEEK.section,
            marked.DEEPSEEK.section_end,
        ),
        _marks(marked.DEEPSEEK),
    ),
    "deepseek_v31": Dialect(marked.deepseek, _sections(marked.DEEPSEEK), _marks(marked.DEEPSEEK)),
    "deepseek_v32": _invoked(invoked.DSML),
    "minimax_m2": _invoked(invoked.MINIMAX),
    "kimi": Dialect(marked.kimi, _sections(marked.KIMI, "functions."), _marks(marked.KIMI)),
    "granite": Dialect(marked.granite, _listed(marked.GRANITE), (marked.GRANITE, "<|/tool_call|>")),
    "cohere": Dialect(
        marked.cohere,
        Spelling('{"tool_name": "', '", "parameters": ', "}", ", ", f"{marked.ACTION[0]}[", f"]{marked.ACTION[1]}"),
        (*marked.ACTION, *marked.COHERE_TEXT),
    ),
    "command_r": Dialect(
        marked.listed(marked.COMMAND_R),
        Spelling('{"tool_name": "', '", "parameters": ', "}", ", ", f"{marked.COMMAND_R[0]}\n[", "]```"),
        marked.COMMAND_R[:1],
    ),
    "functiongemma": _gemma(gemma.FUNCTION_GEMMA),
    "gemma4": _gemma(gemma.GEMMA_4),
    "internlm": Dialect(
        marked.listed(marked.INTERNLM),
        Spelling(
            '{"name": "', '", "parameters": ', "}", ", ", f"{marked.INTERNLM[0]}{marked.PLUGIN}\n", marked.INTERNLM[1]
        ),
        (*marked.INTERNLM, marked.PLUGIN),
    ),
    "jamba": _list(marked.JAMBA),
    "nemotron": _list(marked.NEMOTRON),
    "functools": _list(marked.FUNCTOOLS),
    "lfm2": _list(llama.LFM2, llama.lfm2),
    "olmo3": _list(llama.OLMO3, llama.olmo3),
    "harmony": Dialect(
        harmony.harmony,
        Spelling("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        harmony.MARKS,
        has_channels=True,
    ),
}

STYLES: Mapping[str, Thinking | None] = {
    "none": None,
    "think": thinking.THINK,
    "brackets": thinking.BRACKETS,
    "seed": thinking.SEED,
    "cohere": thinking.COHERE,
    "longcat": thinking.LONGCAT,
    "phrases": thinking.PHRASES,
}

_SIGNS = (
    ("<|channel|>", "harmony"),
    (invoked.DSML_MARK, "deepseek_v32"),
    (invoked.MINIMAX.blocks[0][0], "minimax_m2"),
    (marked.ACTION[0], "cohere"),
    ("Write 'Action:'", "command_r"),
    (gemma.FUNCTION_GEMMA.open, "functiongemma"),
    (gemma.GEMMA_4.open, "gemma4"),
    (tagged.SEED[0], "seed_oss"),
    (tagged.LONGCAT[0], "longcat"),
    (marked.NEMOTRON[0], "nemotron"),
    (marked.INTERNLM[0], "internlm"),
    (llama.LFM2[0], "lfm2"),
    (llama.OLMO3[0], "olmo3"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    (marked.KIMI.section, "kimi"),
    ("[ARGS]", "mistral_named"),
    (marked.TOOL_CALLS, "mistral"),
    (marked.GRANITE, "granite"),
    ("<tool_call>", "hermes"),
    (marked.JAMBA[0], "jamba"),
    ("functools[", "functools"),
    ("<|start_header_id|>", "llama"),
    ("<|header_start|>", "llama"),
    ("<|python_tag|>", "llama"),
)


def dialect_of(template: str) -> str:
    """Returns the name of the dialect that a chat template shows; Hermes' for one that shows none."""
    if marked.DEEPSEEK.call in template:
        return "deepseek" if "```json" in template else "deepseek_v31"
    return next((name for sign, name in _SIGNS if sign in template), "hermes")


def style_of(template: str) -> str:
    """Returns the name of the style of reasoning that a chat template shows."""
    for name in ("brackets", "seed", "cohere", "longcat", "think", "phrases"):
        style = STYLES[name]
        if style is not None and (style.close in template or style.open in template):
            return name
    return "none"


@dataclass(frozen=True)
class OutputSyntax:
    """The way in which one model writes its output."""

    dialect: Dialect = DIALECTS["hermes"]
    style: Thinking | None = None

    @classmethod
    def of(cls, template: str, dialect: str = "", style: str = "") -> OutputSyntax:
        """Returns the syntax that a template shows, except where it is named. Raises `ValueError` for unknown names."""
        for known, name in ((DIALECTS, dialect), (STYLES, style)):
            if name and name not in known:
                raise ValueError(f"the format '{name}' is not known; known are {', '.join(known)}")
        return cls(DIALECTS[dialect or dialect_of(template)], STYLES[style or style_of(template)])

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.dialect.marks, *((self.style.open, self.style.close) if self.style else ()))

    @property
    def end_of_thought(self) -> str:
        """The mark that ends the reasoning; "" for a model without any."""
        if self.dialect.has_channels:
            return "<|end|>"
        return self.style.close if self.style else ""

    def read_marks(self, tools: Tools) -> tuple[str, ...]:
        """Returns the marks that the parser of a request reads."""
        style = (self.style.open, self.style.close) if self.style else ()
        return (*style, *(self.dialect.marks if self._reads_calls(tools) else ()))

    def is_open_after(self, prompt: str) -> bool:
        return self.style is not None and self.style.is_open_after(prompt)

    def parser(self, tools: Tools, is_open: bool) -> MakeParser:
        """Returns the maker of parsers for a request. `is_open` says that the prompt has opened the reasoning."""
        style = None if self.dialect.has_channels else self.style
        if not self._reads_calls(tools) and style is None:
            return PlainText
        read = self.dialect.read if self._reads_calls(tools) else _plain
        return partial(Parser, partial(_read, read, style, is_open), tools)

    def _reads_calls(self, tools: Tools) -> bool:
        return tools.may_call or self.dialect.has_channels


def _read(read: Format, style: Thinking | None, is_open: bool, scan: Scan) -> Wait[None]:
    if style is not None:
        yield from thinking.think(scan, style, is_open)
    yield from read(scan)


def _plain(scan: Scan) -> Wait[None]:
    yield from scan.up_to((), scan.text)
