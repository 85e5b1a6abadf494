"""Which draws of a row with proposals count. Pure.

The row draws at every position, with the noise of (seed, position), as if its proposals were true. A draw is the
sequence's own token if all proposals before it were. For proposals that are certain (one-hot) this is exact rejection
sampling (Leviathan 2023): proposal x is accepted with p(x), else the token is distributed as p without x. The op
`verify` of kernels/ is the same rule on a device.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from workers.engine.plan import Drawn


def own_draws(
    proposals: Sequence[int], drawn: Sequence[Drawn], end_ids: Set[int]
) -> tuple[Drawn, ...]:
    """The first draws, up to the first one that differs from its proposal or ends the choice; at least one. `drawn` has
    one more than `proposals`."""
    for place, proposal in enumerate(proposals):
        token = drawn[place].token
        if token != proposal or token in end_ids:
            return tuple(drawn[: place + 1])
    return tuple(drawn)
