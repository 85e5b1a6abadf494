"""One request at upstreams, attempt after attempt until something was answered, as a worker's call.

It keeps the promises of a worker: output stays within the lease, and every call ends with one `Finished`, `Lost` or
`Refused`. Before the first token an attempt that failed is made again, elsewhere if there is another place; after it
the request fails. It knows no client and no ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from accounting.values.types import BoughtAttempt, Usage
from gateway.routing.links.link import CallPiece, Event, Lost, Mailbox, Refused, TextDelta
from gateway.upstreams import answer as answers
from gateway.upstreams import exchange, outcomes
from gateway.upstreams.answer import Answer
from gateway.upstreams.exchange import AttemptFailed
from gateway.upstreams.outcomes import Fault
from gateway.upstreams.place import Place
from gateway.upstreams.wires import kinds
from gateway.upstreams.wires.values import Ask, Chunk, Counter
from gateway.upstreams.witness import Judged
from workers.protocol.counts import TokenUsage
from workers.protocol.messages import Finished, TimelineEvent, TokenDelta

logger = logging.getLogger(__name__)

SILENCE_S = 15.0
"""The time for which the gateway may leave a lease as it is, as for a worker of ours."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True)
class Order:
    """The parts of which a call is made."""

    request_id: str
    served: str
    ask: Ask
    lease_bound: int
    count: Counter | None = None
    traceparent: str = ""
    """The request's trace and the span of its answer, which each attempt names to its upstream."""


class LeaseEnded(Exception):
    """No more output may be spent."""


class UpstreamCall:
    num_reasoning: int | None = 0

    def __init__(
        self,
        order: Order,
        places: Callable[[Sequence[Place]], Place | None],
        session: aiohttp.ClientSession,
        mailbox: Mailbox,
        number: int,
        ended: Callable[[UpstreamCall], None],
    ) -> None:
        """`places` chooses the next place, given those that were tried; `ended` is called once nothing more comes."""
        self.worker = f"upstream:{order.served}"
        self.bought: list[BoughtAttempt] = []
        self._order, self._places, self._session = order, places, session
        self._mailbox, self._number, self._ended = mailbox, number, ended
        self._bound, self._is_last = order.lease_bound, False
        self._wanted = order.ask.max_tokens * order.ask.num_choices
        self._moved = asyncio.Event()
        self._num_told = 0
        self._is_over = False
        self._now: tuple[Place, Answer] | None = None
        """The running attempt."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_done)

    # The gateway's side

    def extend(self, bound: int, *, last: bool = False, wait_ms: int = 0) -> None:
        self._bound, self._is_last = max(self._bound, bound), self._is_last or last
        self._moved.set()

    def cancel(self, index: int = -1, reason: str = "client") -> None:
        """Ends the whole request: the provider is hung up on. One choice of several cannot be ended there."""
        if index < 0:
            self._task.cancel()

    def close(self) -> None:
        self._is_over = True
        self._task.cancel()

    # The attempts

    async def _run(self) -> None:
        tried: list[Place] = []
        fault = Fault("no_upstream")
        while len(tried) < (tried[0].upstream.source.attempts if tried else 1):
            place = self._places(tried)
            if place is None:
                break
            if place in tried:
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** tried.count(place))
                await asyncio.sleep(max(pause_s * random.uniform(0.5, 1.0), place.wait_s(self._order.served)))
            tried.append(place)
            found = await self._attempt(place)
            if found is None:
                return
            fault = found
            if not fault.may_retry or self._num_told:
                break
        self._end(Lost(fault.reason) if self._num_told else Refused(outcomes.client_error(fault)))

    async def _attempt(self, place: Place) -> Fault | None:
        """Makes one attempt. Returns why it failed; None if the request has ended."""
        order = self._order
        answer = Answer(place.upstream, order.served, order.ask, order.count)
        place.begin(order.served)
        self._now = place, answer
        wire = kinds.of(place.upstream.source.kind)
        try:
            async with contextlib.aclosing(
                exchange.chunks(self._session, wire, place.upstream, order.served, order.ask, order.traceparent)
            ) as found:
                async for several in found:
                    for chunk in several:
                        await self._take(answer, chunk)
            answer.check_whole()
            await self._finish(place, answer)
        except LeaseEnded:
            self._cut("budget" if self._is_last else "length")
        except asyncio.CancelledError:
            self._cut("cancelled")
            raise
        except AttemptFailed as failed:
            return self._failed(place, answer, failed.fault)
        except answers.Broken as broken:
            return self._failed(place, answer, Fault(broken.reason))
        except Exception:  # a fault of ours says nothing of the upstream, which would count as being tried for ever
            place.cut(order.served)
            raise
        finally:
            place.end()
            self._now = None
        return None

    async def _take(self, answer: Answer, chunk: Chunk) -> None:
        """Passes a chunk on, once the lease covers it."""
        before = answer.shown
        if not answer.add(chunk):
            return
        answer.mark_first_token()
        if answer.exceeds(self._wanted):
            raise LeaseEnded  # it ignores the bound that it was given
        await self._covered(min(answer.num_tokens, self._wanted))
        answer.shown = max(before, min(answer.num_tokens, self._wanted))
        calls = tuple(CallPiece(one.index, one.id, one.name, one.arguments) for one in chunk.calls)
        self._tell(chunk.index, answer.shown, chunk.text, chunk.reasoning, calls)

    async def _covered(self, num_tokens: int) -> None:
        """Waits until the lease covers that number of tokens. Raises `LeaseEnded` if it never will."""
        while num_tokens > self._bound:
            if self._is_last or self._bound >= self._wanted:
                raise LeaseEnded
            self._moved.clear()
            if self._num_told < self._bound:
                self._tell(0, self._bound)  # so that the gateway sees that the lease runs out
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._moved.wait()
            except TimeoutError:
                raise LeaseEnded from None

    def _tell(
        self, index: int, num_tokens: int, text: str = "", reasoning: str = "", calls: Sequence[CallPiece] = ()
    ) -> None:
        new = max(0, num_tokens - self._num_told)
        self._num_told += new
        if self._num_told == 0:
            self._num_told = new = 1  # something was shown: no other attempt may follow
        self._put(TextDelta(index, new, text, reasoning, calls))

    # Endings

    async def _finish(self, place: Place, answer: Answer) -> None:
        if answer.seen.is_long:
            await asyncio.to_thread(answer.seen.count_whole)
        if answer.stated is not None and self._order.ask.endpoint != "embeddings":
            with contextlib.suppress(LeaseEnded):
                await self._covered(min(answer.likely_output, self._wanted))
        judged = answer.judge(min(self._bound, self._wanted))
        self.num_reasoning = min(judged.usage.output, answer.num_reasoning)
        place.delivered(self._order.served, answer.first_token_s)
        self._note(place, answer, "delivered", judged)
        for index, vector in answer.vectors.items():
            self._put(TokenDelta(self._order.request_id, 0, index, 0, vector=vector))
        for index, finish in sorted(answer.finishes.items()):
            self._put(TextDelta(index, 0, finish=finish))
        self._end(self._finished(answer, judged.usage, "stop"))

    def _cut(self, why: str) -> None:
        """Ends an answer of which we take no more."""
        if self._now is None:
            return
        place, answer = self._now
        place.cut(self._order.served)
        if self._is_over:
            return
        judged = answer.judge_cut(min(self._bound, self._wanted))
        self.num_reasoning = min(judged.usage.output, answer.num_reasoning)
        self._note(place, answer, "cut", judged)
        for index in range(self._order.ask.num_choices):
            self._put(TextDelta(index, 0, finish=answer.finishes.get(index, "length")))
        self._end(self._finished(answer, judged.usage, why))

    def _failed(self, place: Place, answer: Answer, fault: Fault) -> Fault:
        place.failed(self._order.served, fault)
        self._note(place, answer, "failed", Judged(Usage()))
        logger.warning(
            "upstream_failed",
            extra={"request_id": self._order.request_id, "upstream": place.upstream.name, "why": fault.reason},
        )
        return fault

    def _note(self, place: Place, answer: Answer, state: str, judged: Judged) -> None:
        attempt = answer.statement(len(self.bought), state, judged)
        if state != "failed" or attempt.stated is not None or answer.provider_id:
            self.bought.append(attempt)
            place.expected_cost += attempt.expected_cost
        if attempt.drift:
            place.drift[attempt.drift] += abs((attempt.stated or Usage()).total - judged.usage.total)

    def _finished(self, answer: Answer, usage: Usage, reason: str) -> Finished:
        counts = TokenUsage(usage.cache_read, usage.cache_write, usage.uncached, usage.output)
        timeline = tuple(TimelineEvent(name, us) for name, us in answer.timeline())
        why = "budget" if reason == "budget" else "length" if reason == "length" else "stop"
        return Finished(self._order.request_id, 0, counts, why, timeline=timeline)  # type: ignore[arg-type]

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._end(Lost("cancelled"))
        elif (error := task.exception()) is not None:
            logger.error("upstream_call_failed", exc_info=error)
            self._end(Lost("internal"))

    def _put(self, event: Event) -> None:
        if not self._is_over:
            self._mailbox.put(self._number, event)

    def _end(self, event: Event) -> None:
        self._put(event)
        if not self._is_over:
            self._is_over = True
        self._ended(self)
