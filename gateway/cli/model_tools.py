"""`headgate plan` and `headgate calibrate`: they need torch, so each starts another module by exec. That module has the
options and their help. It gets all arguments unchanged, but for the demo model's name: the engine knows directories and
hub ids.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from gateway.cli.model import DEMO_MODEL_ID, demo_model_path


def _handed_on(name: str, module: str, summary: str) -> click.Command:
    def run(arguments: tuple[str, ...]) -> None:
        sys.stdout.flush()
        if _is_demo(os.environ.get("HEADGATE_MODEL", "")):
            os.environ["HEADGATE_MODEL"] = str(demo_model_path())
        given = [str(demo_model_path()) if _is_demo(one) else one for one in arguments]
        os.execv(sys.executable, [sys.executable, "-m", module, *given])  # noqa: S606 - the interpreter itself

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
        short_help=summary,
    )


def _is_demo(name: str) -> bool:
    return name == DEMO_MODEL_ID and not Path(name).exists()


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
