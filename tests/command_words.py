"""Every command of the command line, and the words without which it says only what is missing."""

from __future__ import annotations

import click

from gateway.cli.main import main


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    context = click.Context(group)
    found: dict[tuple[str, ...], click.Command] = {}
    for name in group.list_commands(context):
        at, command = (*path, name), group.get_command(context, name)
        assert command is not None
        found |= leaves(command, at) if isinstance(command, click.Group) else {at: command}
    return found


COMMANDS = leaves(main)


def needed(command: click.Command) -> list[str]:
    """The words without which a command says only what is missing."""
    words = [_right(param) for param in command.params if isinstance(param, click.Argument) and param.required]
    for param in command.params:
        if isinstance(param, click.Option) and param.required:
            words += [param.opts[0], _right(param)]
    return words + (["--yes"] if any(param.name == "yes" for param in command.params) else [])


def _right(param: click.Parameter) -> str:
    if isinstance(param.type, click.Choice):
        return str(param.type.choices[0])
    words = {"TIME": "2026-10-01", "AMOUNT": "1.00", "YYYY-MM": "2026-10", "integer": "1", "integer range": "1"}
    return words.get(param.type.name, "2026-10" if param.name == "period" else "word")
