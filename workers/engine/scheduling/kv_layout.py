"""Interface of what decides which of its computed tokens a sequence holds KV of: all of them, or a part (sparsity/). The
module is pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from workers.engine.scheduling.step_plan import StepPlan
from workers.engine.sequences.sequence import Attempt, Sequence
from workers.engine.values.layout import Layout
from workers.engine.values.probe import Probe

Fresh = Callable[[Callable[[], int]], list[int] | None]
"""Takes as many new blocks as the function returns, or returns None if there are too few for now. It may preempt other
sequences, and asks the function again after each of them."""


class Tables(Protocol):
    """Operations of block tables that a layout may use (block_tables.py)."""

    def is_common(self, sequence: Sequence, index: int) -> bool: ...

    def detach(self, sequence: Sequence, table: list[int], step: int) -> None: ...


class KVLayout(Protocol):
    def place(self, sequence: Sequence) -> int:
        """Returns the index of its next token among the tokens whose KV it holds."""
        ...

    def num_dropped(self, sequence: Sequence) -> int:
        """Returns the number of its computed tokens whose KV it holds no more. What it computes after it dropped any is
        for itself alone."""
        ...

    def exceeds(self, sequence: Sequence) -> bool:
        """Returns whether it has to hold fewer blocks before its next token."""
        ...

    def thin(self, sequence: Sequence, plan: StepPlan, tables: Tables, fresh: Fresh) -> bool:
        """Makes it hold fewer blocks, with space for its next token. Returns False if there are not enough blocks for
        the copies."""
        ...

    def num_copies(self, attempt: Attempt) -> int:
        """Returns the number of blocks that a sequence will hold in addition to those of its prompt at some time."""
        ...

    def forked(self, sequence: Sequence, child: Sequence) -> None:
        """Notes that `child` goes on from the same blocks."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Notes that the sequence holds no blocks any more."""
        ...

    def of_row(self, sequence: Sequence, num_tokens: int) -> tuple[Layout | None, Probe | None]:
        """Returns the layout and the probe of a row that computes its next tokens."""
        ...

    def probed(self, sequence: Sequence, answer: Any) -> None:
        """Takes the answer to the probe of its row."""
        ...


class WholeLayout:
    """Every sequence holds the KV of all its computed tokens."""

    def place(self, sequence: Sequence) -> int:
        return sequence.num_scheduled

    def num_dropped(self, sequence: Sequence) -> int:
        return 0

    def exceeds(self, sequence: Sequence) -> bool:
        return False

    def thin(self, sequence: Sequence, plan: StepPlan, tables: Tables, fresh: Fresh) -> bool:
        raise AssertionError("nothing exceeds anything")

    def num_copies(self, attempt: Attempt) -> int:
        return 0

    def forked(self, sequence: Sequence, child: Sequence) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def of_row(self, sequence: Sequence, num_tokens: int) -> tuple[Layout | None, Probe | None]:
        return None, None

    def probed(self, sequence: Sequence, answer: Any) -> None:
        pass
