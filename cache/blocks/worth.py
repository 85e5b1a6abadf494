"""The priorities of blocks: what a request asked for ranges of its prompt, and what its output gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

OUTPUT_DISCOUNT = 10
"""The difference between the priority of output and that of the prompt before it: conversations lose answers before
system prompts."""


@dataclass(frozen=True, slots=True)
class Range:
    """Prompt tokens from `start` up to `end`, exclusive, and their `priority`. With a `ttl_ms` these tokens, and all
    before them, are pinned for that time after each use."""

    start: int
    end: int
    priority: int
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Worth:
    """The priorities of the blocks that one sequence commits. If two ranges overlap, the later one counts."""

    block_size: int
    prompt_end: int
    """The end of the prompt in blocks."""
    prompt: int = 50
    output: int | None = None
    """The priority of output. None stands for a little less than the prompt's."""
    ranges: tuple[Range, ...] = ()

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields (end, priority) of each run of equal priority in the blocks [start, end). O(ranges ** 2)."""
        cuts = {edge // self.block_size for r in self.ranges for edge in (r.start, r.end)}
        for cut in sorted(cut for cut in {*cuts, self.prompt_end, end} if start < cut <= end):
            yield cut, self.of_block(cut - 1)

    def of_block(self, block: int) -> int:
        if block >= self.prompt_end:
            return max(0, self.prompt - OUTPUT_DISCOUNT) if self.output is None else self.output
        for one in reversed(self.ranges):
            if one.start // self.block_size <= block < one.end // self.block_size:
                return one.priority
        return self.prompt
