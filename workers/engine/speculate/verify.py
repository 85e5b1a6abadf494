"""Choice of the draws of a row with proposals that count. The module is pure.

The row draws at every node, with the noise of (seed, position), as if the nodes of its branch were true. The first draw
is the sequence's own token. If a child of the node has that token, the draw after that child is the next one. For a
list of proposals that are certain (one-hot) this is exact rejection sampling (Leviathan 2023): proposal x is accepted
with p(x), else the token is distributed as p without x. The op `verify` of kernels/ is the same rule on a device.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from workers.engine.values.plan import SampledToken
from workers.engine.values.token_tree import ROOT, Proposal


def own_path(
    proposal: Proposal, drawn: Sequence[SampledToken], end_ids: Set[int]
) -> tuple[tuple[int, ...], tuple[SampledToken, ...]]:
    """Returns the nodes that were right, from the first one on, and the draws that count. There is one draw more than
    nodes, unless the last node ends the choice. `drawn` has one more entry than the proposal has tokens; the draw after
    node i has index i + 1."""
    nodes, kept, node = [], [drawn[0]], ROOT
    while (token := kept[-1].token) not in end_ids:
        child = proposal.follow(node, token)
        if child is None:
            break
        node = child
        nodes.append(node)
        kept.append(drawn[node + 1])
    return tuple(nodes), tuple(kept)


def moves(nodes: Sequence[int], start: int, block_table: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Returns (source, destination) slots that bring accepted nodes to their positions. `start` is the position of the
    last known token."""

    def slot(position: int) -> int:
        return block_table[position // size] * size + position % size

    return [(slot(start + 1 + node), slot(start + 1 + place)) for place, node in enumerate(nodes) if node != place]
