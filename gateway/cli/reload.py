"""`headgate reload`: a running `headgate up` reads its models again."""

from __future__ import annotations

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
    os.kill(pid, RELOAD)
    outcome = _outcome(found)
    if outcome.error:
        fail(f"The models stay as they were: {outcome.error}")
    click.echo(f"Served now: {', '.join(outcome.models)}.")


def _outcome(home: Home) -> _Outcome:
    until = time.monotonic() + LIMIT_S
    while not home.reloaded.exists():
        if home.runs_as() is None:
            fail("`headgate up` ended meanwhile.")
        if time.monotonic() > until:
            fail(f"No answer came within {LIMIT_S:.0f} s: the output of `headgate up` says what it waits for.")
        time.sleep(POLL_S)
    return msgspec.json.decode(home.reloaded.read_bytes(), type=_Outcome)


COMMANDS = [reload]
