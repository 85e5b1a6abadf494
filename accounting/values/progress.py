"""How far a long piece of work is. The one who does it tells numbers, and knows nothing of who looks at them."""

from __future__ import annotations

from collections.abc import Callable

Told = Callable[[int, int], None]
"""Is told how much is done, and of how much. Both may be any unit: bytes, steps, seconds of a range."""


def nobody(done: int, of: int) -> None:
    """Takes the numbers where nobody looks."""
