"""Characters that a person does not see: control characters, changes of direction, surrogates. The module is pure."""

from __future__ import annotations

import unicodedata

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # Persian and the scripts of India need them


def is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN and character not in _JOINERS


def hidden(text: str) -> str | None:
    """Returns the first hidden character of the text, written like `U+202E`; None if it has none."""
    return next((f"U+{ord(character):04X}" for character in text if is_hidden(character)), None)
