"""A proposer that knows the answers and gets some of them wrong."""

from __future__ import annotations

import random

from workers.engine.speculate.speculation import Speculation


class Informed:
    """`answers`: (request id, choice) -> its output. Proposes up to what was asked for, sometimes nothing; each token is
    another one with probability `error`. Expects something half of the time."""

    needs_blocks = False

    def __init__(self, answers, seed=0, error=0.2):
        self.answers = answers
        self.error = error
        self.num_asked = 0
        self._random = random.Random(seed)

    def propose(self, asks):
        self.num_asked += len(asks)
        return [self._one(ask) for ask in asks]

    def expects(self, sequence, drafting):
        return self._random.random() < 0.5

    def forget(self, region):
        pass

    def _one(self, ask):
        sequence, source = ask.sequence, self._random
        done = len(sequence.output)
        answer = self.answers[sequence.attempt.message.request_id, sequence.index]
        found = answer[done : done + ask.num_tokens + source.choice((0, 0, 3))]
        if source.random() < 0.1:
            return ()
        return [token if source.random() >= self.error else token + 1 for token in found]


def speculating(proposer, **options):
    """For `scripted_engine` and `Driver`: the option `speculate`."""
    return lambda cache: Speculation(proposer, cache, **options)
