"""What is known of the choices of one engine request, and which of them the client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.text.choice import ChoiceText


@dataclass
class Choice:
    text: ChoiceText
    num_received: int = 0
    total_logprob: float = 0.0
    """Of the tokens up to its end, if they came with logprobs."""
    finish: str | None = None
    whole: list[str] = field(default_factory=list)
    """The text so far; kept only where it must have a form."""

    @property
    def mean_logprob(self) -> float:
        return self.total_logprob / max(1, self.text.num_tokens)


def best(choices: Sequence[Choice], number: int | None, *, ranked: bool) -> list[int]:
    """Indices of the best `number`, by mean logprob unless they came `ranked`. None, or no more than there are: as
    they came."""
    indices = list(range(len(choices)))
    if number is None or number >= len(choices):
        return indices
    if not ranked:
        indices.sort(key=lambda index: choices[index].mean_logprob, reverse=True)
    return indices[:number]
