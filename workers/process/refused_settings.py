"""One sentence for a setting that cannot be used: its name, its value, where it was set, and what was expected.

It takes faults in the form of pydantic's `errors()`. Every process uses it, so that all of them say the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CONFIG, CONFIG_NAMES = "HEADGATE_CONFIG", "HEADGATE_CONFIG_NAMES"
"""The variables by which the `headgate` command tells a process of its file: its path, and what was set by it."""
PREFIX = "HEADGATE_"
_SECRET = re.compile(r"secret|password|token|key|url", re.IGNORECASE)
_SHOWN = 80
_LONGEST = 300


def sentence(fault: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Returns the sentence. `fault` is one entry of a `ValidationError`'s `errors()` whose location is a field."""
    field = str(fault["loc"][0])
    name = PREFIX + field.upper()
    if fault["type"] == "missing":
        return f"The environment variable {name} is not set."
    value = environ.get(name)
    given = "" if value is None or _SECRET.search(field) else f" = {value[:_SHOWN]!r}"
    return f"Cannot use {place(name, environ)}{given}: {_expected(fault)}."


def place(name: str, environ: Mapping[str, str]) -> str:
    """Says which setting it is: one of the file, or a variable."""
    if name in environ.get(CONFIG_NAMES, "").split(","):
        return f"the setting {name.removeprefix(PREFIX).lower()} of {environ.get(CONFIG)} ({name})"
    return f"the environment variable {name}"


def _expected(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "string_pattern_mismatch":
        return "docs/configuration.md says how it is written"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]}..."
    return message.replace("Input should", "it should", 1).rstrip(".")
