"""Wrong values in every argument, option and setting: one sentence and a documented status, never a traceback."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

import click
import pytest
from click.testing import CliRunner
from command_words import COMMANDS, needed

from accounting.values.setting_rows import NAMES
from gateway.base import settings as gateway_settings
from gateway.cli import up
from gateway.cli.exit_codes import FAULT, MEANINGS
from gateway.cli.main import main
from gateway.configuration.file import SETTINGS, read
from workers.engine import settings as worker_settings
from workers.engine.values.errors import StartError
from workers.jobs.base import settings as jobs_settings

WORDS = (
    "",
    " ",
    "-1",
    "0",
    "x y",
    "1e999",
    "nan",
    "9" * 30,
    "../../etc/passwd",
    "\x1b[31mred",
    "a" * 5000,
    "ü\u202e",
    "%s",
    "{",
)
PLACES = (*WORDS, "/dev/null", "/proc/nothing/here", "http://", "ftp://h:x/", "redis://h:99999", "true", "[1", "a=b=c")


REFUSED = (gateway_settings.SettingsError, jobs_settings.SettingsError, StartError)
NEEDED = {
    "HEADGATE_HOME": "/tmp",
    "HEADGATE_URL": "http://localhost",
    "HEADGATE_BROKER_URL": "memory://",
    "HEADGATE_MODEL": "any",
}


@pytest.fixture(autouse=True)
def closed(tmp_path, monkeypatch):
    """Nothing is served, nothing is started, and no command's variables are left for other tests."""
    before = dict(os.environ)

    def no_start(*_: Any) -> None:
        raise SystemExit(0)

    async def no_run(_: Any) -> None:
        return None

    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HEADGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "execv", no_start)
    monkeypatch.setattr(os, "execve", no_start)
    monkeypatch.setattr(up, "run", no_run)
    monkeypatch.setenv("HEADGATE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("HEADGATE_API_KEY", "hg_admin_none")
    monkeypatch.setenv("HEADGATE_DATABASE_URL", f"sqlite+aiosqlite:///{tmp_path}/none/x.db")
    yield tmp_path
    for name in os.environ.keys() - before.keys():
        os.environ.pop(name)


def judged(words: list[str], home: Any) -> None:
    done = CliRunner().invoke(main, [*words, "--home", str(home)], input="")
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exc_info)
    assert done.exit_code in MEANINGS and done.exit_code != FAULT, (words, done.output)
    assert "Traceback" not in done.output, (words, done.output)
    if done.exit_code:
        assert re.search(r"\w", done.output), words


def takes_a_value(param: click.Parameter) -> bool:
    if param.name in ("home", "as_json", "yes", "help"):
        return False
    return not (isinstance(param, click.Option) and (param.is_flag or param.count))


@pytest.mark.parametrize(
    ("at", "command"), COMMANDS.items(), ids=lambda one: " ".join(one) if type(one) is tuple else ""
)
def test_wrong_arguments_are_one_sentence(at, command, closed):
    if at in (("plan",), ("calibrate",)):
        pytest.skip("a value may name a model, which is loaded")
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    for number, param in enumerate(param for param in command.params if takes_a_value(param)):
        for value in WORDS[number % 3 :: 3]:
            if isinstance(param, click.Argument):
                place = arguments.index(param)
                words = [*needed(command)]
                words[place : place + 1] = ["--", value] if len(arguments) == 1 and len(words) == 1 else [value]
                judged([*at, *words] if "--" not in words else [*at, "--home", str(closed), *words], closed)
            else:
                judged([*at, *needed(command), f"{param.opts[0]}={value}"], closed)


def refusals(name: str, value: str) -> list[str]:
    """What each process says of a setting. Any other error than a refusal is raised."""
    said = []
    environ = {**NEEDED, name: value}
    for load in (
        lambda: gateway_settings.load(environ),
        lambda: jobs_settings.load(environ),
        lambda: worker_settings.load(),
    ):
        try:
            load()
        except REFUSED as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_wrong_setting_is_refused_by_its_name(name, monkeypatch):
    for key, needed_value in NEEDED.items():
        monkeypatch.setenv(key, needed_value)
    for value in PLACES[len(name) % 3 :: 3]:
        monkeypatch.setenv(name, value)
        for said in refusals(name, value):
            assert name in said or name.removeprefix("HEADGATE_").lower() in said, (value, said)
            assert said.isprintable(), (value, said)
            assert len(said) < 1000, (value, said)


@pytest.mark.parametrize("value", ["[]", "{}", "[1]", "1979-05-27", "{a = 1}", '"\\u0000"', "[[1]]", "inf", "-0x1"])
def test_a_wrong_value_in_the_file_is_refused_by_its_name(value, tmp_path):
    path = tmp_path / "headgate.toml"
    for name in SETTINGS:
        path.write_text(f"{name} = {value}\n")
        said = refused(path)
        assert said.isprintable()
        assert not said or name in said or "is not TOML" in said, said


def refused(path: Any) -> str:
    """The sentence about a file, or an empty text if it can be read."""
    try:
        read(path)
    except gateway_settings.SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", ["3", "{x = 1}", '["a"]'])
def test_upstreams_that_are_no_tables_are_told_how_they_are_written(value, tmp_path):
    path = tmp_path / "headgate.toml"
    path.write_text(f"upstreams = {value}\n")
    said = f"upstreams in {path} must be tables like [upstreams.NAME], each with a url and models."
    assert refused(path) == said


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = ", b"[models]\nx = 1", b"[models.x]", b"models = 3", b"\x00"])
def test_a_broken_file_is_one_sentence_in_every_command(content, closed):
    (closed / "headgate.toml").write_bytes(content)
    for words in (["tenants", "list"], ["config", "check"], ["config", "show"], ["doctor"], ["up"], ["status"]):
        judged(words, closed)


@pytest.mark.parametrize(
    "url", ["", "nonsense", "ftp://x", "http://", "http://[::1", "http://127.0.0.1:99999", "http://\x01", "http://a b"]
)
def test_a_wrong_url_of_the_gateway_is_one_sentence(url, closed, monkeypatch):
    monkeypatch.setenv("HEADGATE_URL", url)
    for words in (["tenants", "list"], ["status"], ["top"], ["requests", "list"]):
        judged(words, closed)


def test_up_on_an_address_that_is_taken_makes_no_home(closed):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(main, ["up", "--home", str(closed / "new"), "--port", str(port)])
    assert done.exit_code == 1
    assert f"The address 127.0.0.1:{port} cannot be used" in done.output
    assert not (closed / "new").exists()
