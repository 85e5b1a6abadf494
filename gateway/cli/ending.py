"""The end of every command: whatever happens becomes one sentence and a status, and an object too where JSON was asked for.

Click's own endings print several lines, and give Ctrl-C, a refused question and a reader that has gone the same status.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from gateway.cli.common import json_is_asked, tell
from gateway.cli.exit_codes import CLOSED, FAILED, INTERRUPTED, OK, TERMINATED
from gateway.cli.faults import sentence, wants_traceback

NOT_ANSWERED = "Nothing was done, because the question was not answered with yes; --yes answers it beforehand."


def ended(command: Callable[[], Any], words: Sequence[str]) -> NoReturn:
    """Runs a command and ends the process with its status. `words` is the command line."""
    _open_streams()
    try:
        found = command()
        sys.stdout.flush()
    except SystemExit:
        _flush_or_leave()
        raise
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except click.Abort as error:
        raise SystemExit(_aborted(error, words)) from None
    except BrokenPipeError:
        _leave_output()
        raise SystemExit(CLOSED) from None
    except click.ClickException as error:
        raise SystemExit(_refused(error, words)) from None
    except Exception as error:  # the outermost frame of every command: its user gets a sentence and no traceback
        if wants_traceback():
            raise
        raise SystemExit(_failed(error, words)) from None
    raise SystemExit(found if isinstance(found, int) else OK)


@contextmanager
def cleared_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the block as Ctrl-C does, so that what it would leave behind is removed. Only the first one counts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes no handlers elsewhere
        return

    def end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def closed_by_reader(command: Callable[[], Any]) -> Any:
    """Runs a part of a command inside of click, which would end it with status 1 where the reader has gone."""
    try:
        return command()
    except BrokenPipeError:
        _leave_output()
        raise SystemExit(CLOSED) from None


def _aborted(error: click.Abort, words: Sequence[str]) -> int:
    """Click tells neither Ctrl-C nor the end of the input from an answer of no, but for the error before it."""
    if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
        return INTERRUPTED
    tell(NOT_ANSWERED, FAILED, as_json=json_is_asked(words))
    return FAILED


def _refused(error: click.ClickException, words: Sequence[str]) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    said = _with_bounds(error, error.format_message()).strip().rstrip(".")
    hint = ""
    if isinstance(error, click.UsageError) and error.ctx is not None and error.ctx.command.add_help_option:
        hint = f" See `{error.ctx.command_path} --help`."
    mark = "" if said.endswith(("?", "!")) else "."
    tell(f"{' '.join(said.split())}{mark}{hint}", error.exit_code, as_json=json_is_asked(words))
    return error.exit_code


def _with_bounds(error: click.ClickException, said: str) -> str:
    """Says which numbers an option takes, where click calls them a valid integer range."""
    kind = error.param.type if isinstance(error, click.BadParameter) and error.param is not None else None
    if not isinstance(kind, click.types.IntParamType):
        return said
    lowest, highest = (kind.min, kind.max) if isinstance(kind, click.IntRange) else (None, None)
    bounds = "" if lowest is None else f" from {lowest} on" if highest is None else f" from {lowest} to {highest}"
    return said.replace(f"a valid {kind.name}", f"a whole number{bounds}")


def _failed(error: Exception, words: Sequence[str]) -> int:
    said, status = sentence(error)
    _flush_or_leave()
    tell(said, status, as_json=json_is_asked(words))
    return status


def _open_streams() -> None:
    """Opens the null device for a standard stream that the caller has closed: none of our files gets its number, and
    reading finds an end.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it lives as long as the process


def _flush_or_leave() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _leave_output()


def _leave_output() -> None:
    """Lets nobody write to an output that takes nothing: Python would complain about it once more at its end."""
    sys.stdout = io.StringIO()
