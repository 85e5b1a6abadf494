"""The tokens that a prompt holds, as words of bits. They are made once for each prompt, not once for each step.

It knows ids and the form of `EditTensors.prompt_bits`. A prompt is known by its object: whoever makes a `SampleSpec`
gives the same array in each step, and changes it never.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.kv.transport import word_bits


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The words of one prompt that are not 0: their places in the line, and their bits."""

    places: array[int]
    bits: array[int]


class PromptWords:
    """The words of the prompts that are here. Those of a prompt leave with it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[array[int]], Words]] = {}
        """Words by the id of the prompt's object, with the object that has this id."""

    def __len__(self) -> int:
        return len(self._known)

    def of(self, prompt: Sequence[int]) -> Words:
        """Returns the words of a prompt. The object is the same in each call, for a prompt that is an array."""
        key = id(prompt)
        known = self._known.get(key)
        if known is not None and known[0]() is prompt:
            return known[1]
        words = _words(prompt)
        if isinstance(prompt, array):
            self._known[key] = weakref.ref(prompt, lambda gone: self._forget(key, gone)), words
        return words

    def _forget(self, key: int, gone: weakref.ref[array[int]]) -> None:
        known = self._known.get(key)
        if known is not None and known[0] is gone:  # else another prompt has the id by now
            del self._known[key]


def _words(prompt: Sequence[int]) -> Words:
    words: dict[int, int] = {}
    for token in set(prompt):
        words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
    return Words(array("i", words), word_bits(list(words.values())))
