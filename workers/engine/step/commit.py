"""Commit of a step's results: they become tokens, counts, nodes of the prefix tree, endings and deltas. The module
knows values, but neither the device nor the loop."""

from __future__ import annotations

import logging

from workers.engine.beams.beams import Beams
from workers.engine.grammars.library import GrammarError
from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.scheduling.step_plan import Work
from workers.engine.sequences.sequence import Attempt, Sequence, Status
from workers.engine.speculate.proposer import Outcome
from workers.engine.step.attempts import Attempts, log_fields
from workers.engine.step.pipeline import InFlightStep
from workers.engine.step.step_messages import StepMessages
from workers.engine.values.plan import RowResult, SampledToken
from workers.engine.values.record import StepRecord

logger = logging.getLogger(__name__)


class Commit:
    def __init__(self, scheduler: Scheduler, attempts: Attempts, outbox: StepMessages, beams: Beams) -> None:
        self._scheduler = scheduler
        self._attempts = attempts
        self._outbox = outbox
        self._touched: list[Attempt] = []
        self._token_gaps: dict[float, int] = {}
        self._beams = beams

    def step(self, flight: InFlightStep) -> StepRecord:
        """Commits a step. Rows of a sequence that ended while they were in flight, or whose step before failed, are
        dropped."""
        plan, record, void = flight.plan, flight.record, flight.void
        now, speculation = record.collected_at, self._scheduler.speculation
        for work, result in zip(plan.work, flight.results, strict=True):
            if work.sequence.status is Status.ENDED or (void and work.sequence in void):
                self._scheduler.drop(work, record)
                continue
            try:
                if found := flight.own.get(work.sequence):
                    self._verified(work, *found, record, now)
                else:
                    self._row(work, result, record, now)
                    if speculation is not None and work.num_draws == 1:
                        speculation.decoded(work.sequence, result)
            except GrammarError as error:
                self._attempts.broken(work.sequence.attempt, "grammar", str(error))
            except Exception:  # whatever it was, the other rows of the step had no part in it
                attempt = work.sequence.attempt
                logger.exception("a row was not committed", extra=log_fields("request_broken", attempt.message))
                self._attempts.broken(attempt)
        # This comes after all rows, because a sibling of the last draw may be in prefill again.
        for attempt in self._touched:
            if attempt.lease.exhausted and not attempt.gang:
                self._attempts.end_choices(attempt, attempt.open_indices, "budget")
        self._scheduler.collected(plan.step)
        self._advance_searches()
        return record

    def take(self) -> tuple[list[Attempt], dict[float, int]]:
        """Returns the attempts that took part since the last call, and the number of token gaps by seconds since the
        sequence's token before."""
        touched, gaps = self._touched, self._token_gaps
        self._touched, self._token_gaps = [], {}
        return touched, gaps

    def _row(self, work: Work, result: RowResult, record: StepRecord, now: float) -> None:
        sequence, num_tokens, num_draws = work
        attempt = sequence.attempt
        self._touched.append(attempt)
        if attempt.wants_prompt_logprobs:
            attempt.prompt_logprobs.extend(result.prompt_logprobs)
        if result.probed is not None and attempt.inputs is None:
            self._scheduler.layout.probed(sequence, result.probed)
        if self._scheduler.advance(work, record):
            attempt.report.event("chunk", now, record.step, num_tokens)
        if attempt.inputs is not None:
            sequence.pooled = result.probed
            if sequence.num_computed == len(sequence.tokens):
                self._attempts.finish_input(sequence, result.probed)
            return
        filled = attempt.message.max_tokens == 0 and sequence.num_computed == len(sequence.tokens)
        if not (num_draws or filled):
            return
        if not attempt.account.closed:
            self._close_prompt(attempt, sequence, record.step, now)
        if filled:
            self._attempts.end_choices(attempt, attempt.open_indices, "length")
            return
        sequences = [sequence]
        if attempt.unforked and not attempt.gang:  # may raise: nothing is counted yet
            sequences = self._scheduler.fork(sequence, attempt.take_unforked(num_draws))
        attempt.lease.in_flight -= num_draws
        attempt.lease.spent += num_draws
        attempt.num_output += num_draws
        record.num_output_tokens += num_draws
        self._scheduler.counters.charge(attempt.message.tenant, output=num_draws)
        if attempt.gang:
            self._beams.offer(sequence, result.drawn[0])
            return
        for one, drawn in zip(sequences, result.drawn, strict=True):
            if one.status is not Status.ENDED:  # ended with a sibling whose grammar allowed no token
                self._token(one, drawn, now)

    def _verified(
        self, work: Work, outcome: Outcome, own: tuple[SampledToken, ...], record: StepRecord, now: float
    ) -> None:
        """Commits a row with proposals. The tokens that were right count like steps of one token each."""
        sequence, num_proposed = work.sequence, len(outcome.proposal.tokens)
        num_accepted = len(own) - 1
        self._scheduler.reject(work, len(own))
        sequence.attempt.num_rejected += num_proposed - num_accepted  # the last token may end it
        num_decode_seqs = record.num_decode_seqs + 1
        for drawn in own:
            if sequence.status is Status.ENDED:  # its grammar cannot be followed behind the token before
                break
            self._row(Work(sequence, 1, 1), RowResult((drawn,)), record, now)
        record.num_decode_seqs = num_decode_seqs
        record.num_proposed += num_proposed
        record.num_accepted += num_accepted
        if sequence.attempt.message.tier == "batch":
            record.num_batch_decode_tokens += num_proposed - num_accepted
        if self._scheduler.speculation is not None:
            self._scheduler.speculation.observe(sequence, outcome)

    def _advance_searches(self) -> None:
        """Lets every search of the step choose its next beams."""
        for attempt, offers in self._beams.take_offered().items():
            if attempt.sequences[0].status is Status.ENDED:
                continue
            self._outbox.progress(attempt)
            try:
                texts = self._beams.advance(attempt, offers)
                if texts is not None:
                    self._attempts.finish_search(attempt, texts)
                elif attempt.lease.exhausted:
                    self._attempts.out_of_budget(attempt)
            except Exception:  # whatever it was, the other rows of the step had no part in it
                logger.exception("a search did not go on", extra=log_fields("request_broken", attempt.message))
                self._attempts.broken(attempt)

    def _close_prompt(self, attempt: Attempt, sequence: Sequence, step: int, now: float) -> None:
        attempt.account.close()
        if attempt.message.max_tokens:
            attempt.report.event("first_token", now, step)
        if attempt.message.pinned or attempt.ranges:
            self._scheduler.block_tables.pin(sequence)

    def _token(self, sequence: Sequence, drawn: SampledToken, now: float) -> None:
        seq_no = len(sequence.output)
        sequence.append(drawn.token)
        finish = sequence.finish_after(drawn.token)
        attempt = sequence.attempt
        self._outbox.token(attempt, sequence.index, seq_no, drawn.token, drawn.logprob, finish)
        if sequence.last_token_at is not None:
            gap = now - sequence.last_token_at
            self._token_gaps[gap] = self._token_gaps.get(gap, 0) + 1
        sequence.last_token_at = now
        if finish is not None:
            self._attempts.finish(sequence, finish)
        elif sequence.automaton is not None and sequence.automaton.fault:
            self._attempts.fail(attempt, "grammar", sequence.automaton.fault)
