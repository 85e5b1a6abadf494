"""`headgate reload`: a running `headgate up` reads its models again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import click
import msgspec

from gateway.base.home import Home
from gateway.cli.common import example_text, fail, home_option

RELOAD = signal.SIGUSR1
"""The signal that this command sends. SIGHUP does the same, unless `headgate up` was started from a terminal."""
POLL_S = 0.1
LIMIT_S = 900.0


class _Outcome(msgspec.Struct, frozen=True):
    error: str
    models: list[str]
    began_at: float
    """The time of the monotonic clock, which all processes share, before the settings were read."""


@click.command(epilog=example_text("reload"))
@home_option
def reload(home: Path) -> None:
    """Serve the models that headgate.toml names now: new ones are loaded, those that are gone are drained. Aliases,
    fallbacks and bounds of a model change at once. All other settings need a restart.
    """
    found = Home(home)
    found.refuse_absent()
    pid = found.runs_as()
    if pid is None:
        fail(f"Nothing runs in {found.root}: start it with `headgate up`.")
    found.reloaded.unlink(missing_ok=True)
    asked_at = time.monotonic()
    os.kill(pid, RELOAD)
    outcome = _outcome(found, asked_at)
    if outcome.error:
        fail(outcome.error)
    click.echo(f"Served now: {', '.join(outcome.models)}.")


def _outcome(home: Home, asked_at: float) -> _Outcome:
    """Waits for the outcome of a reload that began after the signal. One under way may have read older settings."""
    until = asked_at + LIMIT_S
    while (found := _last(home)) is None or found.began_at < asked_at:
        if home.runs_as() is None:
            fail("`headgate up` ended meanwhile.")
        if time.monotonic() > until:
            fail(f"No answer came within {LIMIT_S:.0f} s: the output of `headgate up` says what it waits for.")
        time.sleep(POLL_S)
    return found


def _last(home: Home) -> _Outcome | None:
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode(home.reloaded.read_bytes(), type=_Outcome)
    return None


COMMANDS = [reload]
