"""The tokens that a prompt holds, as words of bits. They are made once for each prompt, not once for each step.

It knows ids and the form of `EditTensors.prompt_bits`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.kv.transport import word_bits
from workers.engine.sampling.derived import Derived


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The words of one prompt that are not 0: their places in the line, and their bits."""

    places: array[int]
    bits: array[int]


class PromptWords(Derived[Sequence[int], Words]):
    """The words of the prompts that are here."""

    def __init__(self) -> None:
        super().__init__(_words)


def _words(prompt: Sequence[int]) -> Words:
    words: dict[int, int] = {}
    for token in set(prompt):
        words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
    return Words(array("i", words), word_bits(list(words.values())))
