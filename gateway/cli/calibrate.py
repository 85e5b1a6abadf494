"""`headgate calibrate`: it runs the model, which needs torch, so it starts another module by exec with all arguments
unchanged.
"""

from __future__ import annotations

import os
import sys

import click

_MODULE = "workers.engine.commands.calibrate_command"


@click.command(
    "calibrate",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Measure a model's largest activations, for smoothing before they are rounded.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def calibrate(arguments: tuple[str, ...]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", _MODULE, *arguments])  # noqa: S606 - the interpreter itself


COMMANDS: tuple[click.Command, ...] = (calibrate,)
