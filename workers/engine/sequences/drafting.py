"""State that speculation keeps of one sequence between two proposals. The sequence holds it, and it decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cache.tree.handle import Handle
from workers.engine.sequences.acceptance import Acceptance
from workers.engine.sequences.ngram import NgramIndex


@dataclass(slots=True)
class Read:
    """The tokens of which a draft model has KV, and the blocks that hold it."""

    handle: Handle | None = None
    """The sequence's own handle when this was written. A sequence that lost its blocks has another handle now."""
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class Drafting:
    """State that speculation keeps of one sequence."""

    __slots__ = ("acceptance", "index", "notes", "num_taught", "read", "wants_hidden")

    def __init__(self, *, wants_hidden: bool = False) -> None:
        self.wants_hidden = wants_hidden
        self.notes: Any = None
        """State that the proposer itself keeps."""
        self.acceptance = Acceptance()
        self.index = NgramIndex()
        self.num_taught = 0
        """Number of tokens that its region's index has seen."""
        self.read = Read()
