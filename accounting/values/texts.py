"""Names and other texts that terminals, logs and documents show, and the characters in them that a person does not see:
control characters, changes of direction, surrogates. The module is pure.
"""

from __future__ import annotations

import unicodedata

from accounting.values.errors import InvalidError

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # Persian and the scripts of India need them


def is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN and character not in _JOINERS


def refuse_hidden(text: str, param: str) -> None:
    """Raises InvalidError if the text has a hidden character."""
    if (character := next(filter(is_hidden, text), None)) is not None:
        raise InvalidError(f"{param} must not have the invisible character U+{ord(character):04X}.", param)


def checked_name(name: str) -> str:
    """Returns the name without spaces at its ends: two names that look equal are one. Raises InvalidError if it is blank or
    too long, or has a hidden character.
    """
    if not name.strip() or len(name) > 200:
        raise InvalidError("A name must have 1 to 200 characters.", "name")
    refuse_hidden(name, "name")
    return name.strip()
