"""What speculation remembers of one sequence between two proposals. A value that the sequence holds; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cache.tree.handle import Handle
from workers.engine.sequences.acceptance import Acceptance
from workers.engine.sequences.ngram import NgramIndex


@dataclass(slots=True)
class Read:
    """What a draft model has KV of: these tokens, in these blocks."""

    handle: Handle | None = None
    """The sequence's own when this was written. A sequence that lost its blocks has another handle now."""
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class Drafting:
    """What speculation knows of one sequence."""

    __slots__ = ("acceptance", "index", "notes", "num_taught", "read", "wants_hidden")

    def __init__(self, *, wants_hidden: bool = False) -> None:
        self.wants_hidden = wants_hidden
        self.notes: Any = None
        """The proposer's own."""
        self.acceptance = Acceptance()
        self.index = NgramIndex()
        self.num_taught = 0
        """Tokens that its region's index has seen."""
        self.read = Read()
