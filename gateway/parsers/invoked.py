"""Calls as `<invoke name="f">` with `<parameter name="p">` inside of a block: MiniMax M2, and with a mark in each tag
DeepSeek V3.2 and V4. An invocation may hold its arguments as one JSON object, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gateway.parsers import json_call, parameters
from gateway.parsers.parameters import ParameterTags
from gateway.parsers.scan import Format, Scan, Wait


@dataclass(frozen=True)
class InvokeTags:
    """The tags of one model."""

    blocks: tuple[tuple[str, str], ...]
    """The tags around several invocations. The first pair is the one that a grammar writes."""
    mark: str = ""
    """The text that each tag has behind its bracket."""

    @property
    def invoke(self) -> str:
        return f'<{self.mark}invoke name="'

    @property
    def invoke_end(self) -> str:
        return f"</{self.mark}invoke>"

    @property
    def parameters(self) -> ParameterTags:
        end = f"</{self.mark}parameter>"
        return ParameterTags(f'<{self.mark}parameter name="', '"', ">", end, (self.invoke_end,), on_lines=False)


DSML_MARK = "｜DSML｜"
DSML = InvokeTags(
    tuple((f"<{DSML_MARK}{name}>", f"</{DSML_MARK}{name}>") for name in ("function_calls", "tool_calls")), DSML_MARK
)
MINIMAX = InvokeTags((("<minimax:tool_call>", "</minimax:tool_call>"),))


def reader(tags: InvokeTags) -> Format:
    return partial(_read, tags)


def _read(tags: InvokeTags, scan: Scan) -> Wait[None]:
    opens, closes = [one for one, _ in tags.blocks], [one for _, one in tags.blocks]
    is_inside = False
    while tag := (yield from scan.up_to((*opens, tags.invoke, *closes), scan.text)):
        if tag in closes and is_inside:
            is_inside = False
            continue
        scan.keep(tag)
        is_call = tag == tags.invoke
        if tag in opens:
            yield from scan.spaces()
            is_call = bool((yield from scan.accept(tags.invoke)))
        if is_call and (yield from _call(scan, tags)):
            is_inside = True
        else:
            scan.give_up(*opens, tags.invoke)
        if scan.is_over:
            return


def _call(scan: Scan, tags: InvokeTags) -> Wait[bool]:
    name = yield from scan.word('"<>\n')
    if not scan.takes_name(name) or not (yield from scan.accept('">')):
        return False
    yield from scan.spaces()
    if (yield from scan.peek()) == "{":
        yield from json_call.arguments(scan, name)
        yield from scan.spaces()
        yield from scan.accept(tags.invoke_end)
        return True
    yield from parameters.arguments(scan, name, tags.parameters)
    return True
