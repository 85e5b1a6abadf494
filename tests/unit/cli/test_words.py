"""O9: what is typed a little wrong is told in the words that were typed, and help is whole."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from load import stretched

from accounting.terms.parties import MAX_LOGO_BYTES
from accounting.values import time_zones
from accounting.values.periods import LAST_SECOND
from gateway.cli import times
from gateway.cli.groups import WHOLE
from gateway.cli.late_commands import LATE_COMMANDS, SUMMARIES
from gateway.cli.main import main


def said(*arguments: str, **environment: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(arguments), env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, " ".join(done.output.split())


def groups() -> list[tuple[str, ...]]:
    """The command itself and all of its groups."""
    context = click.Context(main)
    named = [(name, main.get_command(context, name)) for name in main.list_commands(context)]
    return [(), *((name,) for name, command in named if isinstance(command, click.Group))]


@pytest.mark.parametrize("group", groups(), ids=" ".join)
def test_o9_help_says_every_command_in_whole_sentences(group):
    done = CliRunner().invoke(main, [*group, "--help"], terminal_width=100)
    assert done.exit_code == 0
    assert "..." not in done.output.partition("Commands:")[2], done.output


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("tenats", "list"), "tenants"),
        (("tenants", "lisst"), "list"),
        (("buget", "list"), "budgets"),
        (("verify-bok",), "verify-books"),
        (("invoice", "exportt"), "export"),
    ],
)
def test_o9_a_command_that_is_close_is_suggested(typed, meant):
    status, output = said(*typed)
    assert status == 2
    assert f"Did you mean {meant!r}?" in output


def test_o9_what_is_close_to_nothing_is_not_guessed():
    status, output = said("coffee")
    assert status == 2
    assert "No such command 'coffee'" in output
    assert "Did you mean" not in output


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("tenant", "tenants"),
        ("key", "keys"),
        ("budget", "budgets"),
        ("quota", "quotas"),
        ("limit", "limits"),
        ("price", "prices"),
        ("invoices", "invoice"),
        ("credit", "credits"),
        ("webhook", "webhooks"),
        ("prefix", "prefixes"),
        ("adapter", "adapters"),
        ("journal", "journals"),
        ("exports", "export"),
        ("cost", "costs"),
        ("model-permissions", "models-permissions"),
        ("audits", "audit"),
    ],
)
def test_o9_names_are_found_in_singular_and_plural(typed, name):
    assert said(typed, "--help") == said(name, "--help")
    assert f"Usage: main {name}" in said(typed, "--help")[1]


@pytest.mark.parametrize("typed", ["ups", "gateways"])
def test_o9_no_process_is_started_by_another_name(typed):
    status, output = said(typed)
    assert (status, "Did you mean" in output) == (2, True)


def test_a_worker_is_started_and_workers_are_listed():
    assert "Usage: main worker [OPTIONS] Run one worker" in said("worker", "--help")[1]
    assert "Usage: main workers [OPTIONS] COMMAND" in said("workers", "--help")[1]


@pytest.mark.parametrize("command", ["usage", "costs", "requests list"])
def test_o9_a_range_that_ends_before_it_begins_is_told_by_its_options(command, tmp_path):
    days = ("--from", "2026-11-02", "--to", "2026-11-01")
    status, output = said(*command.split(), *days, "--home", str(tmp_path))
    assert (status, "--from must lie before --to." in output) == (2, True)
    for same in ("2026-11-02", "2026-11-02T00:00Z"):
        status, output = said(*command.split(), "--from", "2026-11-02", "--to", same, "--home", str(tmp_path))
        assert "--from must lie before --to." in output


def test_o9_an_empty_home_is_no_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (("tenants", "list"), ("up",), ("migrate",)):
        status, output = said(*arguments, HEADGATE_HOME="")
        assert status == 78
        assert "HEADGATE_HOME is empty" in output
        status, output = said(*arguments, "--home", "")
        assert status == 2
        assert "must not be empty" in output
    assert list(tmp_path.iterdir()) == []


def test_a_preview_without_a_limit_is_refused_with_where_the_limits_are():
    """It would say that nothing is refused, which is true of no limit and says nothing of those that hold."""
    status, output = said("limits", "preview", "acme", HEADGATE_URL="http://127.0.0.1:1")
    assert status == 2
    for name in ("tenants show", "limits list", "quotas list", "budgets list", "--requests-per-minute"):
        assert name in output, output
    there = {"HEADGATE_URL": "http://127.0.0.1:1", "HEADGATE_API_KEY": "hg_admin_x"}
    status, output = said("limits", "preview", "acme", "--requests-per-minute", "0", **there)
    assert (status, "127.0.0.1:1" in output) == (1, True), "a limit of 0 is one"


def test_where_nothing_runs_the_url_of_a_gateway_elsewhere_is_named_first(tmp_path):
    status, output = said("tenants", "list", "--home", str(tmp_path), HEADGATE_URL="", HEADGATE_API_KEY="")
    assert status == 1
    assert output.index("HEADGATE_URL") < output.index("`headgate up`"), output


def test_a_moment_beyond_the_calendar_is_shown_as_its_last_one():
    """Books of older versions may hold one."""
    assert times.moment(2**40) == times.moment(LAST_SECOND) == "9999-12-30 23:59:59"
    assert times.MOMENT.shown(2**40) == "9999-12-30T23:59Z"
    for zone in ("Pacific/Kiritimati", "Etc/GMT+12"):
        assert time_zones.shown(LAST_SECOND, zone).startswith("9999-12-3")


@pytest.mark.parametrize("typed", ["0001-01-01", "1099511627776", "9" * 30, "9999-12-31"])
def test_a_moment_outside_the_calendar_is_refused_under_its_flag(typed):
    status, output = said("usage", "--from", typed)
    assert status == 2
    assert f"Invalid value for '--from': '{typed}' is not a time from 1970 to 9999-12-30." in output


def test_a_logo_is_read_as_far_as_one_may_be_long(tmp_path):
    """`--logo /dev/zero` took all memory."""
    picture = tmp_path / "logo.png"
    picture.write_bytes(bytes(MAX_LOGO_BYTES + 1))
    status, output = said("issuer", "set", "--logo", str(picture))
    assert status == 2
    assert "has more than 40000 bytes" in output


@pytest.mark.parametrize(
    ("typed", "flag"),
    [
        (("limits", "set", "acme"), "--requests-per-minute"),
        (("keys", "create", "acme"), "--expires-in-s"),
        (("audit", "list"), "--days"),
        (("requests", "list"), "--min-duration"),
        (("prefixes", "add", "m", "--text", "x"), "--ttl-s"),
    ],
)
def test_a_number_that_the_api_cannot_take_is_refused_under_its_flag(typed, flag):
    status, output = said(*typed, flag, "9" * 23)
    assert status == 2
    assert f"Invalid value for '{flag}': {'9' * 23} is " in output


def test_help_has_the_sentences_of_the_commands_themselves():
    """It imports none of them."""
    context = click.Context(main)
    own = {name: main.get_command(context, name).get_short_help_str(WHOLE) for name in LATE_COMMANDS}
    assert own == SUMMARIES


def test_help_loads_no_client_and_a_command_over_http_no_sql():
    """Each took about a second of CPU."""
    asked = (
        "import sys\n"
        "from gateway.cli.main import main\n"
        "def run(*words):\n"
        "    try: main(list(words))\n"
        "    except SystemExit: pass\n"
        "    print('LOADED', *({'sqlalchemy', 'aiohttp', 'torch', 'rich'} & sys.modules.keys()))\n"
        "run('--help')\n"
        "for module in sorted(set(MODULES) - {'maintenance', 'backup', 'secret_rotation', 'model_tools', 'rerate', 'export',"
        " 'doctor', 'config_commands'}): importlib.import_module(f'gateway.cli.{module}')\n"
        "run('tenants', 'list')\n"
    )
    asked = asked.replace("import sys", "import importlib, sys\nfrom gateway.cli.late_commands import MODULES", 1)
    done = subprocess.run(
        [sys.executable, "-c", asked],
        capture_output=True,
        text=True,
        timeout=stretched(60),
        env={**os.environ, "HEADGATE_URL": "http://127.0.0.1:1", "HEADGATE_API_KEY": "hg_admin_none"},
        check=False,
    )
    loaded = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert loaded == [set(), {"aiohttp", "rich"}], done
    assert "No Headgate answers at http://127.0.0.1:1" in done.stderr
