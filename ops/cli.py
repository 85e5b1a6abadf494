"""Writes docs/cli.md, the reference of the `headgate` command, from the commands themselves. `make cli` writes it; a test
fails when it is not current.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from gateway.cli.exit_codes import MEANINGS
from gateway.cli.main import main
from gateway.cli.model_tools import HandedOn

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
EVERYWHERE = frozenset({"home", "as_json", "help"})
GROUPS = (
    ("Run", "up reload migrate gateway worker jobs"),
    ("Look", "status top doctor requests workers"),
    ("Use", "chat batches"),
    ("Settings", "config certificates completion"),
    ("Tenants and keys", "tenants keys audit anomalies"),
    ("Limits", "limits models-permissions quotas budgets"),
    ("Money", "prices issuer billing invoice credits usage costs usage-changes rerate export"),
    ("What is served", "prefixes adapters webhooks upstreams"),
    ("Care of the books", "verify-books journals backup restore secrets"),
    ("Sizing", "plan calibrate"),
)
HEAD = """# The command line

This page is written by `make cli` from the commands themselves. `headgate COMMAND --help` says the same. A page of what is done each
day is in [daily](daily.md), the settings are in [configuration](configuration.md).

## For every command
- `--home DIRECTORY` names the state directory. It may stand before the command or after it. Without it, it is `HEADGATE_HOME`, else
  `.headgate` of the working directory if that is there, else `~/.headgate`.
- `--json` prints JSON instead of text, before or after the command; a command that prints none refuses it. Amounts are micro-units in
  JSON, and decimals with their currency in text. Times in tables are UTC, like `2026-11-24 09:30:00`; a time in a
  tenant's own time zone, as `budgets list` shows ends of periods, has its offset from UTC, like `2026-11-24 10:30:00+01:00`.
- `--config FILE` names the settings file. A flag wins over a variable, and a variable over the file.
- A group's name may be typed in singular: `headgate tenant list`.
- What goes wrong is one sentence on standard error, that names the setting or the argument, its value, and what to do.
  With `--json` standard output has it too: `{"error": {"message": "...", "code": "not_found", "status": 1}}`. The code is the API's, or null.

## Exit status
| status | meaning |
|--:|---|
"""


def page() -> str:
    lines = [HEAD.rstrip("\n"), *(f"| {status} | {meaning} |" for status, meaning in MEANINGS.items()), ""]
    context = click.Context(main, info_name="headgate")
    for title, names in GROUPS:
        lines += [f"## {title}", ""]
        for name in names.split():
            command = main.get_command(context, name)
            assert command is not None
            lines += _told(command, click.Context(command, info_name=name, parent=context))
    return "\n".join(lines).rstrip("\n") + "\n"


def named() -> set[str]:
    """Returns the commands that the page has."""
    return {name for _, names in GROUPS for name in names.split()}


def _told(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, HandedOn):
        command = command.inner()
        context = click.Context(command, info_name=context.info_name, parent=context.parent)
    depth = "###" if context.parent and context.parent.parent is None else "####"
    yield f"{depth} `{context.command_path}`"
    yield ""
    yield _text(command.help or "")
    yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _told(found, click.Context(found, info_name=name, parent=context))
        return
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"```\n{context.command_path} {pieces}\n```"
    yield ""
    yield from _options(command, context)
    example = _example(command.epilog or "")
    if example:
        yield f"```\n{example}\n```\n"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    found = [
        record
        for param in command.params
        if isinstance(param, click.Option)
        and param.name not in EVERYWHERE
        and not param.hidden
        and (record := param.get_help_record(context)) is not None
    ]
    if not found:
        return
    yield "| option | what it does |\n|---|---|"
    for names, text in found:
        yield f"| `{_cell(names)}` | {_cell(text)} |"
    yield ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def _text(text: str) -> str:
    paragraphs = text.replace("\b\n", "").strip().split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)


def _example(epilog: str) -> str:
    lines = [line.strip() for line in epilog.replace("\b", "").splitlines()]
    return "\n".join(line for line in lines if line.startswith("headgate "))


if __name__ == "__main__":
    PAGE.write_text(page())
