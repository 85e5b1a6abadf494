"""`headgate plan` and `headgate calibrate`: they need torch, so each is a command of the engine, which is imported when it
is called. That command has the options and their help. It gets all arguments unchanged, but for the demo model's name: the
engine knows directories and hub ids.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click

from gateway.cli.common import fail, json_option
from gateway.cli.model import DEMO_MODEL_ID, demo_model_path

_OF_WORKERS = ("torch", "transformers", "safetensors", "tokenizers")
"""The packages that the extra `worker` installs."""


class HandedOn(click.Command):
    """A command whose arguments and help are those of a command of the engine."""

    def __init__(self, name: str, module: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._module = module

    def inner(self) -> click.Command:
        """Imports the engine's command."""
        found = importlib.import_module(self._module).main
        assert isinstance(found, click.Command)
        return found


def _handed_on(name: str, module: str, summary: str) -> click.Command:
    def run(arguments: tuple[str, ...], as_json: bool = False) -> None:
        try:
            _call(importlib.import_module(module).main, [*(["--json"] if as_json else []), *arguments])
        except ModuleNotFoundError as error:
            if error.name not in _OF_WORKERS:
                raise
            # By its name alone, pip would install another project's package.
            fail(
                f"`headgate {name}` needs {error.name}: install the extra `worker` from the wheel or the clone that this"
                " Headgate is from, as in pip install './headgate.whl[worker]'."
            )

    return HandedOn(
        name,
        module,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
        short_help=summary,
    )


def _call(command: click.Command, arguments: list[str]) -> None:
    here = click.get_current_context()
    with command.make_context(here.info_name, arguments, parent=here.parent) as ctx:
        if _is_demo(ctx.params["model"]):
            ctx.params["model"] = str(demo_model_path())
        command.invoke(ctx)


def _is_demo(name: str) -> bool:
    return name == DEMO_MODEL_ID and not Path(name).exists()


COMMANDS: tuple[click.Command, ...] = (
    json_option(
        _handed_on(
            "plan",
            "workers.engine.commands.plan_command",
            "Compute how much memory a model needs, what fits on a device, and how fast it can be.",
        )
    ),
    _handed_on(
        "calibrate",
        "workers.engine.commands.calibrate_command",
        "Measure a model's largest activations, for smoothing before they are rounded.",
    ),
)
