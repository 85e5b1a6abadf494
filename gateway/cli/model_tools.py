"""`headgate plan` and `headgate calibrate`: they need torch, so each starts another module by exec, with all arguments
unchanged. That module has the options and their help.
"""

from __future__ import annotations

import os
import sys

import click


def _handed_on(name: str, module: str, summary: str) -> click.Command:
    def run(arguments: tuple[str, ...]) -> None:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - the interpreter itself

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
        short_help=summary,
    )


COMMANDS: tuple[click.Command, ...] = (
    _handed_on(
        "plan",
        "workers.engine.commands.plan_command",
        "Compute how much memory a model needs, what fits on a device, and how fast it can be.",
    ),
    _handed_on(
        "calibrate",
        "workers.engine.commands.calibrate_command",
        "Measure a model's largest activations, for smoothing before they are rounded.",
    ),
)
