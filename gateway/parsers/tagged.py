"""Calls between two tags, such as `<tool_call>` and `</tool_call>`: JSON (Hermes, Qwen, LongCat), `<function=…>`
(Qwen3-Coder, Seed-OSS), or pairs of `<arg_key>` and `<arg_value>` (GLM). What follows the tag says which it is.
"""

from __future__ import annotations

from functools import partial

from gateway.parsers import json_call, parameters
from gateway.parsers.parameters import ParameterTags
from gateway.parsers.scan import Format, Scan, Wait, behind

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
SEED = ("<seed:tool_call>", "</seed:tool_call>")
LONGCAT = ("<longcat_tool_call>", "</longcat_tool_call>")


def reader(open_tag: str = OPEN, close_tag: str = CLOSE) -> Format:
    """Returns the format whose calls stand between these tags."""
    return behind((open_tag, FUNCTION), partial(_call, open_tag, close_tag))


def _call(open_tag: str, close_tag: str, scan: Scan, tag: str) -> Wait[bool]:
    if tag == open_tag:
        yield from scan.spaces()
        if (yield from scan.peek()) == "{":
            if not (yield from json_call.call(scan)):
                return False
            yield from _close(scan, close_tag)
            return True
        tag = yield from scan.accept(FUNCTION)
    name = (yield from scan.word(">\n\r<")).strip()
    if not scan.takes_name(name):
        return False
    if tag:
        if not (yield from scan.accept(">")):
            return False
        tags = ParameterTags("<parameter=", ">", "", "</parameter>", ("</function>", close_tag))
    else:
        yield from scan.spaces()
        if (yield from scan.peek()) != "<":
            return False
        tags = ParameterTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", (close_tag,))
    end = yield from parameters.arguments(scan, name, tags)
    if end and end != close_tag:
        yield from _close(scan, close_tag)
    return True


def _close(scan: Scan, close_tag: str) -> Wait[None]:
    yield from scan.spaces()
    yield from scan.accept(close_tag)
