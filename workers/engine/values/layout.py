"""Layouts of a row's tokens, other than the plain one in which each token stands and lies after the token before it
and sees all of them. Only the runner, and whoever gives a row its layout, looks inside."""

from __future__ import annotations

from typing import NamedTuple


class Tree(NamedTuple):
    """The guesses of a row form a tree (token_tree.py). Its first token is known, slots follow the order of the tokens,
    positions the depth, and a guess attends to its own branch only."""

    parents: tuple[int, ...]
    """Parent of each guess."""


class Thinned(NamedTuple):
    """The KV of some tokens before the row is held no more. The block table names the remaining blocks, in order. Only
    a runner with lag 0 takes such rows, and they have no guesses."""

    num_dropped: int
    """Number of these tokens. They fill whole blocks."""


Layout = Tree | Thinned
