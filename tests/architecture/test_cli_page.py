"""docs/cli.md says what the commands say."""

from __future__ import annotations

import re
from pathlib import Path

import click

from gateway.cli.exit_codes import MEANINGS
from gateway.cli.main import main
from ops import cli

SOURCES = sorted((Path(cli.__file__).parents[1] / "gateway" / "cli").glob("*.py"))


def test_the_page_is_current():
    assert cli.PAGE.read_text() == cli.page(), "run `make cli`"


def test_the_page_has_every_command():
    assert cli.named() == set(main.list_commands(click.Context(main)))


def test_no_module_ends_with_a_status_that_the_page_has_not():
    numbers = {int(n) for path in SOURCES for n in re.findall(r"SystemExit\((\d+)\)", path.read_text())}
    assert numbers <= MEANINGS.keys()


def test_the_page_has_the_options_of_commands_that_are_handed_on_to_the_engine():
    for name, option in (("plan", "--gpu"), ("calibrate", "--alpha")):
        _, _, section = cli.page().partition(f"### `headgate {name}`\n")
        assert section.lstrip()[0] not in "`#", "it says nothing about the command"
        assert f"| `{option} " in section.partition("\n### ")[0]
