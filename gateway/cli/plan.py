"""`headgate plan`: the worker's own arithmetic. It needs torch, so it starts another module by exec with all arguments
unchanged.
"""

from __future__ import annotations

import os
import sys

import click

_MODULE = "workers.engine.commands.plan_command"


@click.command(
    "plan",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="What a model needs, what fits on a device, and how fast it can be.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(arguments: tuple[str, ...]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", _MODULE, *arguments])  # noqa: S606 - the interpreter itself


COMMANDS: tuple[click.Command, ...] = (plan,)
