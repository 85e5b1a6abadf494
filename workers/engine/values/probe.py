"""Probes: questions that a row may ask of its pass, besides draws. The answer comes in `RowResult.probed`, and only the one that asked
looks at it."""

from __future__ import annotations

from typing import NamedTuple

DECAY = 0.9
"""Weight of a measured token's attention relative to the next token's."""


class HiddenStates(NamedTuple):
    """The row asks for the last hidden states from which its draws are made. The answer is the runner's own tensor
    `[num_draws, hidden]`, or None if the row draws nothing."""


class AttentionMass(NamedTuple):
    """The row asks for the attention that each block of its table receives, as the mean over layers and heads. The
    answer is a tuple of floats. The last token contributes one in all, and each token before it DECAY times the one
    after it."""

    num_tokens: int
    """Number of tokens whose attention is measured: the last ones of the row."""


Probe = HiddenStates | AttentionMass
