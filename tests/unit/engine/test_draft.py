"""A draft model reads long prompts in parts, so that no step waits for a whole one."""

from __future__ import annotations

from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request
from proposing import speculating

from workers.engine.speculate.draft import CHUNK, DraftProposer

SIZES = {"short": 40, "long": 2 * CHUNK, "longer": 3 * CHUNK + 100}


class Watched(DraftProposer):
    """Records for each call how many tokens the draft read that it had not guessed itself, and who got guesses."""

    def __init__(self, runner):
        super().__init__(runner)
        self.calls = []

    def propose(self, asks):
        first = len(self._runner.steps)
        found = super().propose(asks)
        rows = [row for step in self._runner.steps[first:] for row in step]
        num_read = sum(len(row.tokens) for row in rows) - sum(max(0, len(guess) - 1) for guess in found)
        names = {ask.sequence.attempt.message.request_id for ask, guess in zip(asks, found, strict=True) if guess}
        self.calls.append((num_read, names))
        return found


def runner():
    return ScriptedRunner(num_blocks=1600, block_size=4)


def test_a_draft_reads_a_chunk_of_prompts_in_a_step_and_then_goes_on():
    draft = Watched(runner())
    drive = Driver(runner(), max_batch_tokens=4096, speculate=speculating(draft))
    for name, size in SIZES.items():
        drive.send(generate_request(name, encode(name + "abcdefg" * size)[:size], 80))
    drive.run().check_idle()
    for name in SIZES:
        drive.check_alone(drive.requests[LINK, name])
    assert max(num_read for num_read, _ in draft.calls) <= CHUNK
    begun = {name: next(i for i, (_, names) in enumerate(draft.calls) if name in names) for name in SIZES}
    assert begun["short"] == 0 < begun["long"] < begun["longer"]
    assert sum(num_read for num_read, _ in draft.calls) <= sum(SIZES.values()) + 3 * (80 + 7), "read twice"
    totals = drive.engine.totals
    assert totals.num_accepted == totals.num_proposed > 100
