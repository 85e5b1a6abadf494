"""Patterns that text in a body must match, and the description of each for people. `$` alone would allow a line break
at the end.
"""

from __future__ import annotations

import re

MONTH = r"^20\d\d-(0[1-9]|1[0-2])$(?!\n)"
CURRENCY = r"^[A-Za-z]{3}$(?!\n)"
AMOUNT = r"^[0-9]{1,12}(\.[0-9]{1,6})?$(?!\n)"
ABSOLUTE_PATH = "^/"
SHEET_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$(?!\n)"
SCHEMA_NAME = r"^[A-Za-z0-9_-]{1,64}$"
MAX_TOOL_NAME = 128
"""The longest name of a tool. Clients of MCP servers put the server's name in front."""
TOOL_NAME = rf"^[A-Za-z0-9_-]{{1,{MAX_TOOL_NAME}}}$(?!\n)"
EMAIL = r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+$(?!\n)"
UPSTREAM_NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$(?!\n)"
PRINTABLE = r"^[!-~]*$(?!\n)"
ONE_LINE = r"^[^\r\n]*$(?!\n)"

WORDS = {
    MONTH: "a month, written like 2026-10",
    CURRENCY: "the three letters of a currency, like USD",
    AMOUNT: "an amount like 12.50: digits and one decimal point",
    ABSOLUTE_PATH: "a path that begins with /",
    SHEET_NAME: "letters, digits, '.', '_' and '-', beginning with a letter or digit",
    SCHEMA_NAME: "1 to 64 letters, digits, '_' and '-'",
    TOOL_NAME: f"1 to {MAX_TOOL_NAME} letters, digits, '_' and '-'",
    EMAIL: "a mail address",
    UPSTREAM_NAME: "1 to 63 small letters, digits, '_' and '-', beginning with a letter or digit",
    PRINTABLE: "ASCII characters without a space",
    ONE_LINE: "one line of text",
}
_REFUSED = re.compile(r"Expected `str` matching regex (?P<pattern>.*)", re.DOTALL)


def words_for(refusal: str) -> str | None:
    """Describes the required value of the pattern that the validator's message names; None if the message names no
    pattern.
    """
    match = _REFUSED.fullmatch(refusal)
    if match is None:
        return None
    return next((words for pattern, words in WORDS.items() if repr(pattern) == match["pattern"]), "of another form")
