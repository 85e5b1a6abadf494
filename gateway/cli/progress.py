"""A bar with the share that is done and the time left, on standard error.

There is none where standard error is no terminal, or where JSON is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from accounting.values.progress import Told, nobody


@contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Told]:
    """Gives what long work tells its numbers to. The bar appears with the first of them."""
    if quiet or not sys.stderr.isatty():
        yield nobody
        return
    bar = click.progressbar(length=1, label=label, file=sys.stderr)

    def told(done: int, of: int) -> None:
        bar.length = max(of, 1)
        bar.update(min(done, bar.length) - bar.pos)

    with bar:
        yield told
        told(bar.length or 1, bar.length or 1)
