"""Harmony, the messages of gpt-oss: each has a header with a channel, and a recipient if it is a call."""

from __future__ import annotations

import re

from gateway.parsers.json_call import decoded
from gateway.parsers.scan import Scan, Wait
from gateway.schema.forms import MAX_TOOL_NAME

MESSAGE, START = "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
MARKS = (MESSAGE, *ENDS, "<|channel|>", "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(rf"to=(?:functions\.)?([A-Za-z0-9_-]{{1,{MAX_TOOL_NAME}}})")


def harmony(scan: Scan) -> Wait[None]:
    header = yield from _first_header(scan)
    while (yield from scan.peek()):
        start = scan.place
        pieces = [header]
        if not (yield from scan.up_to((MESSAGE,), pieces.append)):
            return  # the output was cut inside of a header
        yield from _message(scan, "".join(pieces), start - len(header))
        header = ""
        if scan.is_over:
            return


def _first_header(scan: Scan) -> Wait[str]:
    """Reads the begin of the first header and returns it. A text without a header is written up to its end."""
    scan.keep()
    yield from scan.spaces()
    if (yield from scan.accept("<|", "to=")):
        return scan.restore()
    scan.text(scan.restore())
    yield from scan.up_to(ENDS, scan.text)
    return ""


def _message(scan: Scan, header: str, start: int) -> Wait[None]:
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    if recipient is not None and scan.takes_name(recipient[1]):
        yield from _call(scan, recipient[1])
    elif channel is not None and channel[1] == "analysis":
        scan.reasoning.append((start, None))
        if (yield from scan.up_to(ENDS, scan.thought)):
            scan.reasoning[-1] = (start, scan.place)
    else:
        yield from scan.up_to(ENDS, scan.text)


def _call(scan: Scan, name: str) -> Wait[None]:
    scan.begin(name)
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        scan.argument(text)

    yield from scan.spaces()
    yield from scan.up_to(ENDS, write)
    if isinstance(decoded("".join(pieces)), dict):
        scan.complete()
