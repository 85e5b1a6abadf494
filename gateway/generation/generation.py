"""One engine request from dispatch to settlement: it turns a worker's events into pieces of text, lease extensions and
an ending.

It keeps two promises together: an admitted request is settled or voided exactly once, and a sequence that nobody waits
for is cancelled. It knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from accounting.values.types import BoughtAttempt, Outcome, Posting, Usage
from gateway.base import errors
from gateway.generation.choices import Choice, best
from gateway.generation.engine_request import EngineRequest
from gateway.limiter.rules import BudgetUse
from gateway.metering.admission import Admitted
from gateway.metering.endings import Noted, Settled
from gateway.metering.lease_keeper import LeaseKeeper
from gateway.metering.leases import LOW_WATER
from gateway.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text, new_call_id
from gateway.routing.links import failures
from gateway.routing.links.link import Call, Event, Link, Lost, Mailbox, Refused, TextDelta
from gateway.routing.links.trust import LinkDown
from gateway.routing.links.worker_link import RequestQuarantined
from gateway.routing.router import Pick
from gateway.text.choice import ChoiceText, Piece
from workers.protocol.counts import PromptCounts, TokenUsage
from workers.protocol.frames import FrameError
from workers.protocol.messages import GATHERED_TOKENS, Failed, Finished, FinishReason, GenerateRequest, TokenDelta

logger = logging.getLogger(__name__)

FINAL_S = 5.0
"""The time that an abort waits for the engine's own counts; a live worker answers within a step."""
MAX_LOST = 2
"""The number of lost workers after which a request still goes on. Each of them may have ended because of it."""


class ChoicePiece(msgspec.Struct, frozen=True):
    """Text of one choice, and the parts that became certain with it. `finish` is set only in the choice's last piece;
    it is `tool_calls` for a choice that ended by itself and has a complete call.
    """

    index: int
    piece: Piece
    finish: str | None = None
    stop_reason: str | int | None = None
    parts: Sequence[Part] = ()


@dataclass
class _State:
    """The reports of the worker so far."""

    prompt: PromptCounts | None = None
    prompt_logprobs: tuple[bytes, ...] = ()
    num_spent: int = 0
    """The number of tokens that the beams of a search have cost so far."""
    final: Finished | Failed | None = None
    lost: bool = False
    """The worker is gone, and no other one has the request."""
    stranded_at: float | None = None
    """The monotonic clock when its worker was lost, until another one has made a token."""
    has_last_words: bool = False
    """The worker was lost behind the last token, and `final` is ours."""
    num_lost: int = 0
    """Workers that ended, or seemed to, while they had the request; not those that gave it back."""
    num_resumes: int = 0
    num_before: int = 0
    """Output tokens that came from the workers before the present one."""
    abort_bound: int | None = None


class Generation:
    """One engine request that admission has let in. Call `dispatch`, `handle` for each event, then `end`; or `abandon`
    at any point."""

    def __init__(
        self, order: EngineRequest, admitted: Admitted, mailbox: Mailbox, number: int, pick: Pick | None = None
    ) -> None:
        self.order = order
        self.admitted = admitted
        self.call: Call | None = None
        self.pick = pick
        """The router's choice with its reasons; None where the worker was given."""
        self._mailbox = mailbox
        self._number = number
        self._state = _State()
        self._most = order.max_tokens * order.num_choices
        """The output tokens of all choices together; no lease goes beyond them."""
        num_choices = order.num_choices if order.pooling is None else 0
        self._choices = [
            Choice(ChoiceText(order.model.tokenizer, order.rules), order.make_parser()) for _ in range(num_choices)
        ]
        self.vectors: dict[int, bytes] = {}
        """The results of a request for vectors, by the index of the input."""
        self.lease = LeaseKeeper(admitted, self._most, mailbox.fail)
        self.first_bound = admitted.lease_bound
        """Output tokens of the first lease."""
        self.is_over = False
        """The ending has begun; no caller may begin another."""

    # Dispatch

    def dispatch(self, link: Link) -> None:
        """Sends the request to the worker. A lease that allows no first token of each choice is extended at once, because
        the worker draws none before that. Raises `ApiError` when it cannot be sent.
        """
        self._send(link, self._request())
        if self.admitted.lease_bound < self.order.num_choices:
            self.lease.keep(self)

    def _request(self) -> GenerateRequest:
        admitted = self.admitted
        return self.order.to_send(admitted.root, admitted.lease_bound, admitted.lease_seq)

    def _send(self, link: Link, request: GenerateRequest) -> None:
        num_uncached = self.pick.num_uncached if self.pick else len(self.order.prompt)
        try:
            ask = (self.order.foreign, self.order.model.counter) if self.order.is_bought else None
            self.call = link.start_call(request, self._mailbox, self._number, num_uncached, ask)
        except LinkDown:
            raise failures.upstream_lost() from None
        except RequestQuarantined:
            raise failures.quarantined() from None
        except FrameError:
            raise errors.too_large("The prompt is too large.") from None

    # Another worker

    @property
    def num_resumes(self) -> int:
        """How often another worker went on where one was lost."""
        return self._state.num_resumes

    def strand(self) -> None:
        """Notes that the worker has left the request, which another one may go on with (`resume`). An answer that has come
        to its end needs no other. Raises `ApiError` if none may: a part of a beam search has come, which cannot be gone
        on with, or too many workers were lost.
        """
        state, order = self._state, self.order
        gave_it_back = isinstance(state.final, Failed)
        if self.call is not None and not gave_it_back:
            state.num_lost += 1
        if state.num_lost > MAX_LOST:
            raise failures.lost_too_often()
        if order.beams is not None and self._is_open and any(choice.num_received for choice in self._choices):
            raise failures.upstream_lost()
        state.lost, state.final = True, None
        state.stranded_at = state.stranded_at or time.monotonic()
        if self._choices and state.prompt is not None and not self._is_open:
            state.lost, state.final, state.has_last_words = False, self._last_words(state.prompt), True

    @property
    def stranded_s(self) -> float:
        """The seconds since its worker was lost, if no other one has made a token yet."""
        at = self._state.stranded_at
        return 0.0 if at is None else time.monotonic() - at

    def resume(self, pick: Pick) -> None:
        """Sends the request to a worker with the same weights, which goes on behind the output that has come. It draws
        by the same seeds, at the same positions. A beam search, whose output comes at its end, begins anew. Raises
        `ApiError` when it cannot be sent.
        """
        state = self._state
        state.num_spent = 0
        has_begun = state.prompt is not None and self.order.beams is None
        request = msgspec.structs.replace(
            self._request(),
            attempt=state.num_resumes + 1,
            resume=tuple(self._open) if has_begun else (),
            num_output_spent=self.num_received,
            prompt_logprobs=self.order.prompt_logprobs if state.prompt is None else -1,
        )
        self.pick = pick
        self._send(pick.link, request)
        state.num_resumes += 1
        state.num_before, state.lost = self.num_received, False
        self.lease.moved(self)

    @property
    def _is_open(self) -> bool:
        return any(choice.finish is None for choice in self._choices)

    @property
    def _open(self) -> list[tuple[int, tuple[int, ...]]]:
        """The choices that have not ended, with their output."""
        return [(index, tuple(one.output)) for index, one in enumerate(self._choices) if one.finish is None]

    def _last_words(self, prompt: PromptCounts) -> Finished:
        """Returns the last message of a worker that was lost before it could send it."""
        spent = self.admitted.budget_stop is not None and self.num_received >= self.admitted.lease_bound
        num_output = self.num_received - self._state.num_before
        usage = TokenUsage(prompt.cache_read, prompt.cache_write, prompt.uncached, num_output)
        return Finished(self.order.facts.request_id, self._state.num_resumes, usage, "budget" if spent else "stop")

    # Events

    @property
    def has_final(self) -> bool:
        return self._state.final is not None

    @property
    def budget_stop(self) -> BudgetUse | None:
        """The budget that ended the request, or None."""
        final = self._state.final
        stopped = isinstance(final, Finished) and final.reason == "budget"
        return self.admitted.budget_stop if stopped else None

    @property
    def prompt_logprobs(self) -> tuple[bytes, ...]:
        return self._state.prompt_logprobs

    @property
    def final(self) -> Finished | Failed | None:
        return self._state.final

    def handle(self, event: Event) -> ChoicePiece | None:
        """Handles one event of the worker and returns its text, if there is any. Raises `ApiError` for every failed
        end.
        """
        if isinstance(event, TokenDelta):
            return self._on_delta(event)
        match event:
            case TextDelta():
                return self._on_text(event)
            case Finished():
                self._state.final = self.pick.explained(event) if self.pick else event
                if event.reason == "lease":
                    raise errors.unavailable("lease_lost", "The request lost its lease.")
                if any(choice.finish is None for choice in self._choices) or self._lacks_vectors:
                    raise errors.internal()  # the request ended without an end of each choice
                return None
            case Failed():
                self._state.final = event
                raise failures.of_failed(event, len(self.order.prompt))
            case Lost():
                self._state.lost = True
                raise failures.quarantined() if event.is_quarantined else failures.upstream_lost()
            case Refused():
                self._state.lost = True
                raise replace(event.error)  # a copy: the event, which this frame holds, would hold the frame

    @property
    def _lacks_vectors(self) -> bool:
        pooling = self.order.pooling
        return pooling is not None and len(self.vectors) < len(pooling.lengths)

    def _on_delta(self, delta: TokenDelta) -> ChoicePiece | None:
        if self.order.pooling is not None:
            self.vectors[delta.index] = delta.vector
            return None
        if delta.prompt is not None and self._state.prompt is None:
            self._state.prompt = delta.prompt
            self._state.prompt_logprobs = delta.prompt_logprobs
        choice = self._choices[delta.index]
        self._count(delta)
        if self.order.beams is not None and delta.tokens and not delta.num_spent:
            logger.error("worker_without_search", extra={"request_id": self.order.facts.request_id})
            raise errors.internal()  # it drew samples instead of searching
        scored = len(self.order.sampling.logprob_token_ids) if delta.logprobs else 0
        if scored and any(len(one.top) != scored for one in delta.logprobs):
            logger.error("worker_without_scored_tokens", extra={"request_id": self.order.facts.request_id})
            raise errors.internal()  # it sent the best tokens instead of those that were asked for
        bound = self.admitted.lease_bound
        if bound < self._most and bound - self.num_received <= LOW_WATER:
            self.lease.keep(self)
        if choice.finish is not None:
            return None  # the token follows a stop string: the cancel is on its way
        piece = choice.take(delta, shows_end=self.order.rules.include_stop)
        parts = choice.read(piece.text, self.order.form)
        if choice.text.stop is None and delta.finish is None and not choice.parser.is_over:
            return ChoicePiece(delta.index, piece, parts=parts) if parts or piece.entries else None
        stop_reason = self._end_choice(delta, choice)
        parts += choice.read_end(self.order.form)
        if choice.finish == "stop" and choice.parser.has_calls:
            choice.finish = "tool_calls"
        self._check_form(choice)
        return ChoicePiece(delta.index, piece, choice.finish, stop_reason, parts)

    def _on_text(self, delta: TextDelta) -> ChoicePiece | None:
        """Takes the text of a worker that sends no ids. It is in parts already, and stop strings were found there."""
        choice = self._choices[delta.index]
        choice.num_received += delta.num_tokens
        self.lease.keep(self)
        parts: list[Part] = [Reasoning(delta.reasoning)] if delta.reasoning else []
        parts += [Text(delta.text)] if delta.text else []
        for call in delta.calls:
            parts += [CallBegin(call.index, call.id or new_call_id(), call.name)] if call.name else []
            parts += [CallArguments(call.index, call.arguments)] if call.arguments else []
        choice.finish = delta.finish
        return ChoicePiece(delta.index, Piece(delta.text), delta.finish, None, parts) if parts or delta.finish else None

    def _end_choice(self, delta: TokenDelta, choice: Choice) -> str | int | None:
        """Sets the choice's finish and returns the stop string or token that the client named."""
        if choice.text.stop is None and delta.finish is not None:
            choice.finish = _FINISH.get(delta.finish, "stop")
            return self._stop_reason(delta)
        choice.finish = "stop"
        if delta.finish is None and self.call is not None:
            self.call.cancel(delta.index, "stop")
        return choice.text.stop

    def _count(self, delta: TokenDelta) -> None:
        if self.order.pooling is not None:
            return  # a vector is no token
        self._state.stranded_at = None
        choice = self._choices[delta.index]
        choice.num_received += len(delta.tokens)
        choice.output.extend(delta.tokens)
        self._state.num_spent = max(self._state.num_spent, delta.num_spent)

    @property
    def shown(self) -> list[int]:
        """Indices of the choices that the client sees, in its order."""
        order = self.order
        return best(self._choices, order.num_shown, ranked=order.beams is not None)

    def _check_form(self, choice: Choice) -> None:
        """A finished choice that does not have the requested form is our error, not the client's success. A text that a
        stop string cut has the beginning of the form alone.
        """
        form = self.order.form
        if form is not None and choice.text.stop is None and not choice.has_form(form):
            logger.error("output_without_form", extra={"request_id": self.order.facts.request_id})
            raise errors.internal()

    def _stop_reason(self, delta: TokenDelta) -> int | None:
        """Names a token that the client gave as a stop token; at the model's own end the reason is null."""
        given = delta.stop_token in self.order.sampling.stop_token_ids
        return delta.stop_token if delta.finish == "stop" and given else None

    @property
    def num_received(self) -> int:
        """The number of output tokens that the worker has sent."""
        if self.order.beams is not None:
            return self._state.num_spent
        if len(self._choices) == 1:
            return self._choices[0].num_received
        return sum(choice.num_received for choice in self._choices)

    @property
    def num_cached(self) -> int | None:
        """The cached tokens of the prompt, once they are known."""
        return self._state.prompt.cache_read if self._state.prompt else None

    @property
    def draws(self) -> bool:
        """Whether output is still to come."""
        return self._state.final is None and self._is_open

    def hold(self) -> None:
        """Called when the client does not read."""
        self.lease.hold(self)

    def release(self) -> None:
        """Called when the client reads again."""
        self.lease.release(self)

    # Endings

    def usage(self) -> Usage:
        """Returns the usage that the client is shown and billed: the prompt by the engine's count, and the output up to
        each choice's end (the platform bears the tokens after a stop string). A search counts every token of every
        beam.
        """
        counts = self._prompt_counts()
        if self.order.is_bought:
            return _usage(counts, self._num_output)
        output = sum([choice.text.num_tokens for choice in self._choices])
        if self.order.beams is not None:
            output = self._state.num_spent
        return _usage(counts, output)

    @property
    def num_reasoning(self) -> int:
        """The number of output tokens of `usage` that are reasoning."""
        if self.order.is_bought:
            return (self.call and self.call.num_reasoning) or 0
        return sum(choice.text.num_begun_in(choice.parser.reasoning) for choice in self._choices)

    def _prompt_counts(self) -> PromptCounts | TokenUsage:
        """Returns the counts of the prompt by the first worker that had computed it: each later one counts it again."""
        state = self._state
        if state.final is not None and not (state.num_resumes and state.prompt):
            return state.final.usage
        return state.prompt or PromptCounts()

    @property
    def _num_output(self) -> int:
        """The number of output tokens of all workers, by the last one's own count if it has sent that."""
        state = self._state
        return self.num_received if state.final is None else state.num_before + state.final.usage.output

    def posting(self) -> Posting:
        """Returns the ending of a request that succeeded, which is not written yet. Needs the final event."""
        assert self.has_final
        return self.admitted.posting(
            "ok", self.usage(), True, bought=self._bought, is_unwitnessed=self._state.has_last_words
        )

    @property
    def _bought(self) -> Sequence[BoughtAttempt]:
        return self.call.bought if self.call is not None else ()

    def unstored(self) -> Posting:
        """Returns the ending if the answer could not be stored."""
        return self.admitted.unstored(self._bought)

    def end(self, posting: Posting, noted: Noted | None = None) -> asyncio.Future[Settled]:
        """Ends the request durably, as `Admitted.end` does."""
        self.is_over = True
        return self.admitted.end(posting, noted)

    def leave(self) -> None:
        """Keeps the request from being ended until `end` comes, or the next start of this gateway."""
        self.is_over = True

    def begin_abort(self) -> None:
        """Sends the cancel to the worker at once. `abandon` waits for the answer, which has the counts."""
        if self.is_over or self._state.abort_bound is not None:
            return
        # The client owes the tokens so far and those that the next message may add, but not those after a stop string.
        added = GATHERED_TOKENS if self.order.gathers else 1
        self._state.abort_bound = sum(
            choice.num_received + added if choice.finish is None else choice.text.num_tokens for choice in self._choices
        )
        if self.order.is_bought:
            self._state.abort_bound = None  # the call counts what it has passed on
        if self.order.beams is not None:
            self._state.abort_bound = self._state.num_spent + len(self._choices)
        if self.call is not None and not self.has_final and not self._state.lost:
            self.call.cancel(reason="client")

    async def abandon(self, outcome: Outcome) -> Settled:
        """Waits for the engine's counts and ends the request without success. Call it after `begin_abort`, and once the
        mailbox has no other reader.
        """
        assert not self.is_over
        self.is_over = True
        if outcome != "client_gone":
            return await self.admitted.void(outcome, bought=self._bought)
        engine_final = self._state.final is not None
        if self.order.is_bought and not engine_final:
            return await self.admitted.void(outcome, bought=self._bought)  # nobody has counted it
        usage = _usage(self._prompt_counts(), self._num_output)
        return await self.admitted.settle(
            outcome, usage, engine_final, max_output=self._state.abort_bound, bought=self._bought
        )

    def note(self, event: Event) -> None:
        """Takes events after an abort; only the counts matter."""
        match event:
            case Finished() | Failed():
                self._state.final = event
            case Lost() | Refused():
                self._state.lost = True
            case TextDelta():
                self._choices[event.index].num_received += event.num_tokens
            case TokenDelta():
                self._state.prompt = self._state.prompt or event.prompt
                self._count(event)

    @property
    def awaits_final(self) -> bool:
        return self.call is not None and not self.has_final and not self._state.lost and not self.is_over

    def close(self) -> None:
        self.lease.close()
        if self.call is not None:
            self.call.close()


_FINISH: dict[FinishReason, str] = {"stop": "stop", "length": "length", "budget": "length"}


def _usage(counts: PromptCounts | TokenUsage, output: int) -> Usage:
    return Usage(counts.cache_read, counts.cache_write, counts.uncached, output)
