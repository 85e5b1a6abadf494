"""A proposer that knows the answers and gets some of them wrong."""

from __future__ import annotations

import random

from workers.engine.scheduling.speculation import Speculation
from workers.engine.speculate.proposer import Proposer
from workers.engine.values.token_tree import ROOT, Grower


class Informed(Proposer):
    """`answers`: (request id, choice) -> its output. Proposes up to what was asked for, sometimes nothing; each token is
    another one with probability `error`. Expects something half of the time."""

    def __init__(self, answers, seed=0, error=0.2):
        self.answers = answers
        self.error = error
        self.num_asked = 0
        self._random = random.Random(seed)

    def begin(self):
        return None

    def propose(self, asks):
        self.num_asked += len(asks)
        return [self._one(ask) for ask in asks]

    def expects(self, sequence, state):
        return self._random.random() < 0.5

    def _one(self, ask):
        sequence, source = ask.sequence, self._random
        done = len(sequence.output)
        answer = self.answers[sequence.attempt.message.request_id, sequence.index]
        found = answer[done : done + ask.num_tokens + source.choice((0, 0, 3))]
        if source.random() < 0.1:
            return ()
        return [token if source.random() >= self.error else abs(token - 1) for token in found]


class InformedTree(Informed):
    """The answer, or a wrong one, somewhere among branches that leave it; nodes in any order that trees may have."""

    def _one(self, ask):
        trunk, source = list(super()._one(ask)), self._random
        branches = [trunk]
        for _ in range(source.randrange(4)):
            keep = source.randrange(len(trunk) + 1)
            branches.append(trunk[:keep] + [source.randrange(3, 120) for _ in range(2)])
        grower, begun = Grower(ask.num_nodes), [[ROOT, branch] for branch in branches]
        while begun:
            one = source.choice(begun)
            node = grower.add(one[0], one[1][0]) if one[1] else None
            if node is None:
                begun.remove(one)
            else:
                one[:] = node, one[1][1:]
        return grower.grown()


def speculating(proposer, **options):
    """Returns the option `speculate` of `scripted_engine` and `Driver`."""
    return lambda cache: Speculation(proposer, cache, **options)
