"""Text that a command reads from a file or from standard input."""

from __future__ import annotations

from typing import IO, AnyStr

import click

MAX_READ = 32 * 2**20
"""The most characters, or bytes, that a command takes from a file: no gateway takes a larger body."""


def text_of(file: IO[str], name: str) -> str:
    """Returns the whole text. Raises `UsageError`, with the option's name, for bytes that are none, or too many."""
    try:
        content = whole_of(file, name)
        content.encode()  # standard input may let bytes through that are none
    except UnicodeError:
        raise click.UsageError(f"{name} is not UTF-8 text.") from None
    return content


def whole_of(file: IO[AnyStr], name: str) -> AnyStr:
    """Returns all that a file has. Raises `UsageError` if it has too much: it may be a device that never ends."""
    content = file.read(MAX_READ + 1)
    if len(content) > MAX_READ:
        raise click.UsageError(f"{name} is larger than {MAX_READ >> 20} MiB.")
    return content
