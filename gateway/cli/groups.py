"""Groups of commands: help in whole sentences, and a suggestion for a mistyped name."""

from __future__ import annotations

import difflib
from typing import Any

import click

WHOLE = 10_000
"""The longest summary in characters. By default click cuts a summary that is longer than a line."""


class Commands(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            meant = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f" Did you mean {meant[0]!r}?" if meant else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(WHOLE)) for name, one in found if one is not None]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
