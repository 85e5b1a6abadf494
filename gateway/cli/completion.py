"""`headgate completion`: the script that a shell needs to complete commands, options and choices."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gateway.cli.common import example_text

PROGRAM, VARIABLE = "headgate", "_HEADGATE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog=example_text("completion bash >> ~/.bashrc\ncompletion fish > ~/.config/fish/completions/headgate.fish")
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes the words of this command."""
    made = get_completion_class(shell)
    assert made is not None
    click.echo(_script(made, ctx.find_root().command))


def _script(made: type, command: click.Command) -> str:
    one = made(command, {}, PROGRAM, VARIABLE)
    return str(one.source_template % one.source_vars())  # `source()` runs bash to learn its version


COMMANDS: tuple[click.Command, ...] = (completion,)
