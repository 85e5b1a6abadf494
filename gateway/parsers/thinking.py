"""Reasoning between two tags at the begin of an output. A template may have opened it in the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.parsers.scan import Scan, Wait


@dataclass(frozen=True)
class Thinking:
    """A pair of tags around reasoning."""

    open: str
    close: str

    def is_open_after(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends inside of the reasoning."""
        return prompt.rstrip().endswith(self.open)


THINK = Thinking("<think>", "</think>")
BRACKETS = Thinking("[THINK]", "[/THINK]")
COHERE = Thinking("<|START_THINKING|>", "<|END_THINKING|>")
LONGCAT = Thinking("<longcat_think>", "</longcat_think>")
SEED = Thinking("<seed:think>", "</seed:think>")
PHRASES = Thinking("Here is my thought process:", "Here is my response:")


def think(scan: Scan, style: Thinking, is_open: bool) -> Wait[None]:
    """Reads the reasoning, if there is any. Line breaks beside the tags belong to the tags."""
    start = scan.place
    scan.keep()
    yield from scan.spaces()
    if not (yield from scan.accept(style.open)) and not is_open:
        scan.text(scan.restore())
        return
    scan.drop()
    scan.reasoning.append((start, None))
    yield from _line_breaks(scan)
    held = ""

    def write(text: str) -> None:
        nonlocal held
        body = (held + text).rstrip("\n")
        held = (held + text)[len(body) :]
        scan.thought(body)

    if not (yield from scan.up_to((style.close,), write)):
        scan.thought(held)
        return
    scan.reasoning[-1] = (start, scan.place)
    yield from _line_breaks(scan)


def _line_breaks(scan: Scan) -> Wait[None]:
    while (yield from scan.peek()) == "\n":
        yield from scan.char()
