"""A command in a folder without a home says so in one sentence, and leaves nothing behind there."""

from __future__ import annotations

import gc
import os
import warnings

import click
import pytest
from click.testing import CliRunner
from command_words import COMMANDS, needed

from gateway.cli.exit_codes import CONFIG, FAILED, OK, USAGE
from gateway.cli.main import main

MAKERS = {("up",), ("gateway",), ("worker",), ("jobs",), ("migrate",)}
"""These commands make a home, or become a process that needs one."""
FOREIGN = {("plan",), ("calibrate",)}
"""They take no home."""
IN_NO_HOME = COMMANDS.keys() - MAKERS - FOREIGN
READERS_OF_BOOKS = (
    ("verify-books",),
    ("journals", "list"),
    ("journals", "replay"),
    ("journals", "abandon", "1", "--yes"),
    ("export", "ledger", "--from", "2026-10-01", "--to", "2026-11-01"),
    ("keys", "create", "--admin", "--name", "x"),
    ("secrets", "rotate-master-key"),
    ("secrets", "rotate-pepper"),
    ("secrets", "drop-old-peppers", "--yes"),
    ("migrate", "--check"),
    ("backup", "x.tar"),
    ("reload",),
)

# Click leaves the files that it opened to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True, scope="module")
def collected():
    """No file that is still open is left to the next module's tests. It takes a second, so it is done once."""
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("HEADGATE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "file").write_text("no directory")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


@pytest.mark.parametrize("at", sorted(IN_NO_HOME), ids=" ".join)
@pytest.mark.parametrize("home", ["empty", "absent"])
def test_no_command_makes_a_file_where_no_home_is(at, home, alone):
    place = alone / home
    if home == "empty":
        place.mkdir()
    done = CliRunner().invoke(main, [*at, *needed(COMMANDS[at]), "--home", str(place)], input="")
    assert done.exit_code in (OK, FAILED, USAGE), done.output
    assert place.exists() == (home == "empty")
    assert home == "absent" or list(place.iterdir()) == []
    assert list((alone / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("words", READERS_OF_BOOKS, ids=" ".join)
def test_what_reads_a_home_names_the_one_that_is_not_there(words, alone):
    done = CliRunner().invoke(main, [*words, "--home", str(alone / "absent")])
    assert done.exit_code == FAILED
    assert done.output == (
        f"headgate: There is no home in {alone / 'absent'}: name one with --home or HEADGATE_HOME, or make one with"
        " `headgate up`.\n"
    )
    assert not (alone / "absent").exists()


def test_a_database_file_that_is_named_and_not_there_is_not_made(alone):
    url = f"sqlite+aiosqlite:///{alone}/books.db"
    done = CliRunner().invoke(main, ["verify-books", "--home", str(alone / "x")], env={"HEADGATE_DATABASE_URL": url})
    assert (done.exit_code, f"There is no database in {alone}/books.db" in done.output) == (FAILED, True)
    assert not (alone / "books.db").exists()


@pytest.mark.parametrize("at", sorted(COMMANDS.keys() - FOREIGN), ids=" ".join)
def test_a_home_that_is_no_directory_is_named_with_its_option(at, alone):
    command = COMMANDS[at]
    if not any(isinstance(param, click.Option) and param.name == "home" for param in command.params):
        pytest.skip("the command reads no home, so it has no --home")
    (alone / "elsewhere" / "word").touch()  # an argument that is a file is looked at first
    for name, why in (("file", "is a file"), ("file/x", f"lies below the file {alone / 'file'}")):
        typed = str(alone / name)
        done = CliRunner().invoke(main, [*at, *needed(command), "--home", typed], input="")
        assert done.exit_code == USAGE, done.output
        assert f"Invalid value for '--home': {typed!r} {why}: name a directory" in done.output
        done = CliRunner().invoke(main, [*at, *needed(command)], env={"HEADGATE_HOME": typed}, input="")
        assert done.exit_code == CONFIG, done.output
        assert f"HEADGATE_HOME = {typed!r} {why}: name a directory, or unset it." in done.output


def test_an_empty_name_of_the_home_is_a_wrong_setting():
    done = CliRunner().invoke(main, ["status"], env={"HEADGATE_HOME": ""})
    assert (done.exit_code, "HEADGATE_HOME is empty" in done.output) == (CONFIG, True)
