"""The rows of a plan that is not `launched` yet: the runner's input for each sequence. The module is pure."""

from __future__ import annotations

from workers.engine.beams.beams import Beams
from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.scheduling.step_plan import StepPlan, Work
from workers.engine.sequences.sequence import Sequence
from workers.engine.values.layout import Tree
from workers.engine.values.plan import PENDING, Row, SampleSpec
from workers.engine.values.probe import Probe
from workers.engine.values.token_tree import ROOT, Proposal

_PENDING_TOKENS = (PENDING,)


class Rows:
    def __init__(self, scheduler: Scheduler, beams: Beams) -> None:
        self._scheduler = scheduler
        self._beams = beams

    def of(self, plan: StepPlan) -> list[Row]:
        """Returns the rows of a plan, in its order."""
        proposals = plan.proposals
        return [
            self._row(work)
            if (proposal := proposals.get(work.sequence)) is None
            else _with_guesses(work, proposal, self._asked(work.sequence))
            for work in plan.work
        ]

    def _row(self, work: Work) -> Row:
        sequence, num_tokens, num_draws = work
        start, attempt = sequence.num_scheduled, sequence.attempt
        row_id, adapter = sequence.row_id, attempt.adapter
        draws = self._draws(sequence, num_draws) if num_draws else ()
        if sequence.num_pending:
            table, probe = sequence.block_ids, self._asked(sequence)
            return Row(_PENDING_TOKENS, start, table, draws, row_id=row_id, adapter=adapter, probe=probe)
        end = start + num_tokens
        prompt_logprobs = next_token = -1
        if attempt.wants_prompt_logprobs:
            prompt_logprobs = attempt.message.prompt_logprobs
            next_token = attempt.prompt[end] if end < len(attempt.prompt) else -1
        if attempt.inputs is not None:
            before = sequence.pooled if start else None
            probe = attempt.inputs.probe(sequence.index, before)
            tokens = sequence.tokens[start:end]
            return Row(tokens, start, sequence.block_ids, row_id=row_id, adapter=adapter, probe=probe)
        layout, probe = self._scheduler.layout.of_row(sequence, num_tokens)
        return Row(
            sequence.tokens[start:end],
            start,
            sequence.block_ids,
            draws,
            prompt_logprobs,
            next_token,
            row_id,
            adapter,
            layout=layout,
            probe=self._asked(sequence) if probe is None else probe,
        )

    def _asked(self, sequence: Sequence) -> Probe | None:
        """Returns what the source of proposals asks of a row of the sequence."""
        speculation = self._scheduler.speculation
        return None if speculation is None else speculation.probe(sequence)

    def _draws(self, sequence: Sequence, num_draws: int) -> tuple[SampleSpec, ...]:
        attempt = sequence.attempt
        if attempt.gang:
            return (self._beams.draw(sequence),)
        params, position = attempt.message.sampling, len(sequence.tokens) + sequence.num_pending
        mask, bans = _mask(sequence), attempt.bans
        if not attempt.unforked:
            banned = () if bans is None else bans.behind(sequence.output)
            return (SampleSpec(params, sequence.seed, position, attempt.prompt, sequence.output, mask, banned),)
        banned = () if bans is None else bans.behind(())
        return tuple(
            SampleSpec(params, seed, position, attempt.prompt, (), mask, banned)
            for seed in attempt.seeds(attempt.unforked[:num_draws])
        )


def _with_guesses(work: Work, proposal: Proposal, probe: Probe | None) -> Row:
    """Returns a row in which the guesses follow the token drawn last. Each draw has the guesses of its branch in its
    output."""
    sequence, start = work.sequence, work.sequence.num_scheduled
    attempt, num_prompt = sequence.attempt, len(sequence.attempt.prompt)
    bans, mask = attempt.bans, _mask(sequence)
    branches = [proposal.path(node) for node in range(ROOT, len(proposal.tokens))]
    outputs = [[*sequence.output, *branch] if branch else sequence.output for branch in branches]
    draws = tuple(
        SampleSpec(
            attempt.message.sampling,
            sequence.seed,
            num_prompt + len(output),
            attempt.prompt,
            output,
            proposal.masks[place] if proposal.masks else mask,
            () if bans is None else bans.behind(output),
        )
        for place, output in enumerate(outputs)
    )
    tokens = sequence.tokens[start:]
    tokens.extend(proposal.tokens)
    return Row(
        tokens,
        start,
        sequence.block_ids,
        draws,
        num_proposed=len(proposal.tokens),
        row_id=sequence.row_id,
        layout=None if proposal.is_chain else Tree(proposal.parents),
        probe=probe,
    )


def _mask(sequence: Sequence) -> bytes | None:
    if sequence.automaton is not None:
        return sequence.automaton.mask
    bans = sequence.attempt.bans
    return None if bans is None else bans.mask
