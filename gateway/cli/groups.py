"""Groups of commands: help in whole sentences, a suggestion for a mistyped name, and the options that stand before it."""

from __future__ import annotations

import difflib
from typing import Any

import click

from gateway.cli.common import JSON, options_before

WHOLE = 10_000
"""The longest summary in characters. By default click cuts a summary that is longer than a line."""


class Commands(click.Group):
    shows_options = False
    """`--home` and `--json` are listed in the help. Only the outermost group lists them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*options_before(hidden=not self.shows_options), *super().get_params(ctx)]

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            meant = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f" Did you mean {meant[0]!r}?" if meant else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        found = super().resolve_command(ctx, args)
        if ctx.meta.get(JSON) and not _prints_json(found[1]):
            ctx.fail(f"`{ctx.command_path} {name}` prints no JSON: leave --json out.")
        return found

    def summary(self, ctx: click.Context, name: str) -> str | None:
        """Returns what help says of a command in its list; None of one that is not there."""
        command = self.get_command(ctx, name)
        return None if command is None else command.get_short_help_str(WHOLE)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.summary(ctx, name)) for name in self.list_commands(ctx)]
        if rows := [(name, summary) for name, summary in found if summary is not None]:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _prints_json(command: click.Command | None) -> bool:
    if command is None or isinstance(command, click.Group):
        return True
    return any(param.name == "as_json" for param in command.params)
