"""The output of a response as it grows: parts of a choice become items, and each change of an item is an event. The
module is pure.

An item is a message, a piece of reasoning, or a call of a function or of a custom tool. At most one item is open at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text

Status = Literal["in_progress", "completed", "incomplete"]
Event = dict[str, Any]
Seal = Callable[[str], str]
"""Returns the encrypted form of a reasoning text."""

Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
_PREFIXES: Mapping[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_CALLED_WITH: Mapping[Kind, tuple[str, str]] = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""The events of what a tool is called with, and the field that has it."""


@dataclass
class Item:
    kind: Kind
    id: str
    index: int
    call: dict[str, str] | None = None
    """The id, the name and the namespace of a call; None for the other kinds."""
    status: Status = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    encrypted: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        """Returns the one content part of a message or of a reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def shown(self) -> dict[str, Any]:
        """Returns the item as clients see it."""
        own: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None:
            return own | self.call | {_CALLED_WITH[self.kind][1]: self.text}
        content = [self.part()] if self.texts or self.status != "in_progress" else []
        if self.kind == "message":
            return own | {"role": "assistant", "content": content}
        return own | {"summary": [], "content": content, "encrypted_content": self.encrypted}


class ResponseItems:
    def __init__(self, key: str, seal: Seal | None = None, names: Mapping[str, tuple[str, str]] | None = None) -> None:
        """`key` is the part of the response's id that its items share. With `seal` reasoning is encrypted, too. `names`
        has the (namespace, name) of functions in namespaces, by the name that the model knows.
        """
        self._key = key
        self._names = names or {}
        self._seal = seal
        self._open: Item | None = None
        self.items: list[Item] = []

    @property
    def is_in_message(self) -> bool:
        """Whether a text that comes next goes on with a message."""
        return self._open is not None and self._open.kind == "message"

    def shown(self) -> list[dict[str, Any]]:
        return [item.shown() for item in self.items]

    def push(self, parts: Sequence[Part], logprobs: Sequence[Any] = ()) -> list[Event]:
        """Adds parts. `logprobs` are those of the tokens of the first text among them."""
        events: list[Event] = []
        for part in parts:
            match part:
                case Text(text):
                    events += self._grow("message", text, logprobs)
                    logprobs = ()
                case Reasoning(text):
                    events += self._grow("reasoning", text)
                case CallBegin(is_custom=is_custom):
                    kind: Kind = "custom_tool_call" if is_custom else "function_call"
                    events += [*self._close("completed"), *self._begin(kind, part)]
                case CallArguments(_, text):
                    assert self._open is not None
                    self._open.texts.append(text)
                    events.append(self._event(f"{_CALLED_WITH[self._open.kind][0]}.delta", self._open, delta=text))
        return events

    def end(self, *, is_whole: bool) -> list[Event]:
        """Ends the output, which is not whole if its bound cut it. An empty output is one empty message."""
        events = [] if self.items or not is_whole else self._grow("message", "")
        return events + self._close("completed" if is_whole else "incomplete")

    def _grow(self, kind: Literal["message", "reasoning"], text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events = [*self._close("completed"), *self._begin(kind)]
        item = self._open
        assert item is not None
        item.texts.append(text)
        item.logprobs += logprobs
        if not text and not logprobs:
            return events
        if kind == "reasoning":
            return [*events, self._event("response.reasoning_text.delta", item, content_index=0, delta=text)]
        more = {"content_index": 0, "delta": text, "logprobs": list(logprobs)}
        return [*events, self._event("response.output_text.delta", item, **more)]

    def _begin(self, kind: Kind, begin: CallBegin | None = None) -> list[Event]:
        index = len(self.items)
        call = None if begin is None else self._call(begin)
        item = self._open = Item(kind, f"{_PREFIXES[kind]}_{self._key}{index:04x}", index, call)
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": index, "item": item.shown()}
        if begin is not None:
            return [added]
        return [added, self._event("response.content_part.added", item, content_index=0, part=item.part())]

    def _call(self, begin: CallBegin) -> dict[str, str]:
        if begin.name not in self._names:
            return {"call_id": begin.id, "name": begin.name}
        namespace, name = self._names[begin.name]
        return {"call_id": begin.id, "name": name, "namespace": namespace}

    def _close(self, status: Status) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        item.status = status
        if item.kind == "reasoning" and self._seal is not None:
            item.encrypted = self._seal(item.text)
        return [
            *self._done(item),
            {"type": "response.output_item.done", "output_index": item.index, "item": item.shown()},
        ]

    def _done(self, item: Item) -> list[Event]:
        if item.kind in _CALLED_WITH:
            event, name = _CALLED_WITH[item.kind]
            return [self._event(f"{event}.done", item, **{name: item.text})]
        if item.kind == "reasoning":
            last = self._event("response.reasoning_text.done", item, content_index=0, text=item.text)
        else:
            own = {"content_index": 0, "text": item.text, "logprobs": list(item.logprobs)}
            last = self._event("response.output_text.done", item, **own)
        return [last, self._event("response.content_part.done", item, content_index=0, part=item.part())]

    def _event(self, kind: str, item: Item, **more: Any) -> Event:
        return {"type": kind, "item_id": item.id, "output_index": item.index, **more}
