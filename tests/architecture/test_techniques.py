"""What docs/techniques.md names is there: tests, benchmarks, settings, commands, pages."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from gateway.cli.main import main
from workers.engine.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "techniques.md"
LINES = PAGE.read_text(encoding="utf-8").splitlines()
QUOTED = re.compile(r"`([^`]+)`")
SETTING = re.compile(r"(?:(?<=HEADGATE_ENGINE)|(?<![\w-]))_[A-Z][A-Z_]+")
OWN = "engine"


def quoted() -> list[list[str]]:
    """By line."""
    return [QUOTED.findall(line) for line in LINES]


def paths() -> list[str]:
    found = []
    for names in quoted():
        folder = "."
        for name in (name.split(" ")[0] for name in names):
            if name.startswith(("tests/", "benchmarks/")):
                folder = str(Path(name).parent)
                found.append(name)
            elif re.fullmatch(r"test_\w+\.py", name):
                found.append(f"{folder}/{name}")
    return found


def test_the_page_was_read():
    assert len(set(paths())) > 60


@pytest.mark.parametrize("path", sorted(set(paths())))
def test_every_test_and_benchmark_is_there(path):
    assert (ROOT / path).exists()


def test_every_page_that_is_linked_is_there():
    linked = re.findall(r"\]\(([^)#:]+)\)", "\n".join(LINES))
    assert [link for link in linked if not (PAGE.parent / link).exists()] == []


def test_every_setting_is_one_of_a_worker():
    named = {name for names in quoted() for one in names for name in SETTING.findall(one)}
    fields = {name.upper() for name in WorkerSettings.model_fields}
    assert len(named) > 20
    assert {name for name in named if OWN.upper() + name not in fields} == set()


def test_every_command_is_one():
    named = [one.split() for names in quoted() for one in names if one.startswith("headgate ")]
    assert len(named) > 4
    for _, *words in named:
        command: click.Command | None = main
        for word in words:
            if not isinstance(command, click.Group) or not word.islower():
                break
            command = command.get_command(click.Context(command), word)
            assert command is not None, words
