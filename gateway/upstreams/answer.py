"""The answer of one attempt as it comes: its text, calls, finishes and statements. But for the clock, the module is
pure.
"""

from __future__ import annotations

import time
from collections import defaultdict
from io import StringIO

import msgspec

from accounting.prices import pricing
from accounting.values.clock import now_ms
from accounting.values.types import BoughtAttempt
from gateway.upstreams.wires.values import Ask, CallDelta, Chunk, Counter, Stated, Upstream, rates_of, their_name
from gateway.upstreams.witness import Judged, Seen, judge, judge_cut

MAX_CALL_BYTES = 1024 * 1024


class Broken(Exception):
    """The answer ended and is none: `reason` is a fixed word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Answer:
    def __init__(self, upstream: Upstream, served: str, ask: Ask, count: Counter | None) -> None:
        self.provider_id = ""
        self.stated: Stated | None = None
        """The last statement."""
        self.finishes: dict[int, str] = {}
        self.vectors: dict[int, bytes] = {}
        self.shown = 0
        """The output tokens that were passed on."""
        self._upstream, self._model, self._ask = upstream, upstream.model(served), ask
        self._name = their_name(served, self._model)
        self.seen = Seen(ask.num_choices, count)
        self._is_whole_statement = False
        self._calls: defaultdict[int, list[StringIO]] = defaultdict(list)
        """The arguments of the calls of each choice."""
        self._num_reasoning_bytes = 0
        self._num_bytes = 0
        self._began, self._began_at_ms = time.monotonic(), now_ms()
        self._first: float | None = None

    def add(self, chunk: Chunk) -> bool:
        """Takes a chunk. Returns whether it has output. Raises `Broken`."""
        self.provider_id = self.provider_id or chunk.provider_id
        if chunk.stated is not None:
            self.stated, self._is_whole_statement = chunk.stated, chunk.is_last_statement
        if chunk.vector:
            self.vectors[chunk.index] = chunk.vector
        if chunk.finish is not None:
            self.finishes[chunk.index] = chunk.finish
        for call in chunk.calls:
            self._add_call(chunk.index, call)
        text = chunk.text + chunk.reasoning + "".join(call.name + call.arguments for call in chunk.calls)
        self._num_reasoning_bytes += len(chunk.reasoning)
        self._num_bytes += len(text)
        self.seen.add(text, sum(bool(call.name) for call in chunk.calls))
        return bool(text or chunk.calls)

    def _add_call(self, index: int, call: CallDelta) -> None:
        calls = self._calls[index]
        if call.index == len(calls) and call.name:
            calls.append(StringIO())
        if call.index >= len(calls):
            raise Broken("wrong_call")
        calls[call.index].write(call.arguments)
        if calls[call.index].tell() > MAX_CALL_BYTES:
            raise Broken("wrong_call")

    def mark_first_token(self) -> None:
        self._first = time.monotonic() if self._first is None else self._first

    @property
    def first_token_s(self) -> float:
        return (self._first or time.monotonic()) - self._began

    def timeline(self) -> list[tuple[str, int]]:
        first, end = round(self.first_token_s * 1e6), round((time.monotonic() - self._began) * 1e6)
        return [("queued", 0), ("matched", 0), ("first_token", first), ("finished", end)]

    # Counts

    @property
    def num_tokens(self) -> int:
        """The output so far, by the provider's running statement or our own count."""
        stated = self.stated
        running = stated.usage.output if stated is not None and not self._is_whole_statement else 0
        return max(running, self.seen.num_tokens, 1)

    @property
    def likely_output(self) -> int:
        """The output that is billed if the lease allows it."""
        return self.judge(2**60).usage.output

    @property
    def num_reasoning(self) -> int:
        stated = self.stated.reasoning if self.stated is not None else 0
        return stated or self._num_reasoning_bytes * self.num_tokens // max(1, self._num_bytes)

    def exceeds(self, wanted: int) -> bool:
        """Says whether there is certainly more output than was asked for."""
        return self.seen.num_certain > wanted

    # Endings

    def check_whole(self) -> None:
        """Raises `Broken` for an answer that ended too early, or whose calls cannot be used. A choice with calls that ends
        with `stop`, as some providers end a named call, ends with `tool_calls` from then on.
        """
        if self._ask.endpoint == "embeddings":
            return
        if len(self.finishes) < self._ask.num_choices:
            raise Broken("cut_short")
        for index, calls in self._calls.items():
            finish = self.finishes[index]
            are_whole = all(_is_object(call.getvalue()) for call in calls)
            is_cut = finish in ("length", "content_filter") or (finish == "stop" and bool(self._ask.body.get("stop")))
            if not is_cut and not are_whole:
                raise Broken("wrong_call")
            if finish == "stop" and are_whole:
                self.finishes[index] = "tool_calls"

    def judge(self, bound: int) -> Judged:
        if self._ask.endpoint == "embeddings":
            bound = 0
        stated = self.stated if self._is_whole_statement else None
        if stated is None and self.stated is not None:
            stated = self.stated if self.stated.usage.output else None
        return judge(stated, self._ask.prompt, self.seen.interval, bound, self._model.hides_reasoning)

    def judge_cut(self, bound: int) -> Judged:
        return judge_cut(self.stated, self._ask.prompt, self.shown, bound)

    def statement(self, attempt: int, state: str, judged: Judged) -> BoughtAttempt:
        """Returns what the ledger keeps of the attempt."""
        stated = None if self.stated is None else self.stated.usage
        if state == "cut" and stated is not None:
            stated = None if not self._is_whole_statement else stated
        return BoughtAttempt(
            attempt=attempt,
            upstream=self._upstream.name,
            model=self._name,
            state=state,  # type: ignore[arg-type]
            started_at_ms=self._began_at_ms,
            provider_id=self.provider_id,
            stated=stated,
            judged=judged.usage,
            drift=judged.drift,
            expected_cost=pricing.charge(judged.usage, rates_of(self._model)).total,
            stated_cost=None if self.stated is None else self.stated.cost_micro_units,
        )


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments or "{}"), dict)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
