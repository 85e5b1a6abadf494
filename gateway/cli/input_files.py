"""Text that a command reads from a file or from standard input."""

from __future__ import annotations

from typing import IO

import click


def text_of(file: IO[str], name: str) -> str:
    """Returns the whole text. Raises `UsageError`, with the option's name, for bytes that are none."""
    try:
        return file.read()
    except UnicodeDecodeError:
        raise click.UsageError(f"{name} is not UTF-8 text.") from None
