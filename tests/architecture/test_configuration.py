"""O8: every setting is on the page, and a variable that nobody reads stops every command and process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from accounting.values import environment, setting_rows
from gateway.base.home import Home
from gateway.base.settings import SettingsError
from gateway.base.settings import load as load_gateway
from gateway.cli.exit_codes import CONFIG
from gateway.cli.main import main
from gateway.journal.journals import worker_journals
from workers.engine.settings import load as load_worker
from workers.engine.values.errors import StartError
from workers.jobs.base.settings import SettingsError as JobsError
from workers.jobs.base.settings import load as load_jobs

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("configuration", ROOT / "ops" / "configuration.py")
assert _spec is not None and _spec.loader is not None
configuration = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(configuration)
HOW = "settings changed: run `make configuration`"


def test_o8_the_page_is_current():
    assert configuration.PAGE.read_text() == configuration.page(), HOW


def test_o8_the_shown_rows_are_current():
    assert configuration.ROWS.read_text() == configuration.rows(), HOW


@pytest.mark.parametrize("name", sorted(setting_rows.NAMES))
def test_o8_every_setting_is_described(name):
    lines = [line for line in configuration.PAGE.read_text().splitlines() if f"| `{name}` |" in line]
    if not name.startswith("HEADGATE_TEST_"):
        assert lines
    for line in lines:
        _, _, default, text, _ = line.replace("\\|", "/").split("|")
        assert default.strip()
        assert len(text) > 10, f"{name}: write what it does below its field"


def test_o8_a_name_that_is_close_is_suggested():
    said = environment.unknown(["HEADGATE_DATABSE_URL", "PATH"])
    assert said == ("The environment variable HEADGATE_DATABSE_URL is unknown. Did you mean HEADGATE_DATABASE_URL?")
    said = environment.unknown(["HEADGATE_COFFEE"])
    assert said == "The environment variable HEADGATE_COFFEE is unknown. See docs/configuration.md."
    assert environment.unknown(["HEADGATE_COFFEE"], also={"HEADGATE_COFFEE"}) is None
    assert environment.unknown([*setting_rows.NAMES, "HEADGATE_TEST_X", "HEADGATE_BENCH_X"]) is None


@pytest.mark.parametrize(
    "command",
    [
        ("tenants", "list"),
        ("up",),
        ("gateway",),
        ("worker",),
        ("jobs",),
        ("migrate",),
        ("plan", "m"),
        ("verify-books",),
    ],
)
def test_o8_no_command_runs_with_an_unknown_variable(command, tmp_path):
    home = ["--home", str(tmp_path)] if command[0] != "plan" else []
    done = CliRunner().invoke(main, [*command, *home], env={"HEADGATE_DATABSE_URL": "x"})
    assert done.exit_code == CONFIG  # units do not start again after it, because no second start mends a name
    assert done.output == (
        "headgate: The environment variable HEADGATE_DATABSE_URL is unknown. Did you mean HEADGATE_DATABASE_URL?\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_o8_help_is_given_all_the_same():
    done = CliRunner().invoke(main, ["--help"], env={"HEADGATE_DATABSE_URL": "x"})
    assert (done.exit_code, "Usage:" in done.output) == (0, True)


NEEDED = {
    "HEADGATE_HOME": "/srv",
    "HEADGATE_MODEL": "m",
    "HEADGATE_URL": "http://h",
    "HEADGATE_BROKER_URL": "memory://",
}


@pytest.mark.parametrize("name", ["HEADGATE_WORKERS", "HEADGATE_ENGINE_QUANTT", "HEADGATE_JOBS_CONCURENCY"])
def test_o8_no_process_starts_with_a_name_of_another_that_is_none(name):
    for load, error in ((load_gateway, SettingsError), (load_jobs, JobsError)):
        with pytest.raises(error, match=f"The environment variable {name} is unknown"):
            load({**NEEDED, name: "2"})
        assert load({**NEEDED, "HEADGATE_ENGINE_QUANT": "int8"}) is not None


def test_o8_a_worker_suggests_names_of_its_own(monkeypatch):
    for name, value in NEEDED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADGATE_ENGINE_QUANTT", "int8")
    with pytest.raises(StartError, match="Did you mean HEADGATE_ENGINE_QUANT\\?"):
        load_worker()


def test_o8_the_command_that_writes_them_changes_nothing_here(tmp_path):
    """What `make configuration` runs; in a copy of both files."""
    code = (
        "import runpy, pathlib\n"
        "old = pathlib.Path.write_text\n"
        "pathlib.Path.write_text = lambda self, text: print(self.name, text == self.read_text())\n"
        f"runpy.run_path({str(ROOT / 'ops' / 'configuration.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["setting_rows.tsv", "True", "configuration.md", "True"]


@pytest.mark.parametrize(
    "name", ["HEADGATE_HOME", "HEADGATE_STATE_DIR", "HEADGATE_ENGINE_ADAPTERS", "HEADGATE_JOBS_PULSE"]
)
def test_o9_an_empty_path_is_not_the_directory_one_is_in(name, monkeypatch):
    for given, value in {**NEEDED, name: ""}.items():
        monkeypatch.setenv(given, value)
    refused = []
    for load in (load_gateway, load_jobs, load_worker):
        try:
            load()
        except (SettingsError, JobsError, StartError) as error:
            refused.append(str(error))
    assert refused
    assert all(name in one and "must not be empty" in one for one in refused), refused


def test_one_variable_moves_the_journals_of_gateways_and_workers(monkeypatch, tmp_path):
    for given, value in {**NEEDED, "HEADGATE_STATE_DIR": str(tmp_path / "state")}.items():
        monkeypatch.setenv(given, value)
    assert load_gateway().journal_dir == tmp_path / "state" / "gateway-0" / "journal"
    assert load_worker().journal_dir == tmp_path / "state" / "worker-0" / "journal"
    assert worker_journals(tmp_path / "state") == {}
    load_worker().journal_dir.mkdir(parents=True)
    assert worker_journals(Home(tmp_path).state) == {"worker-0": load_worker().journal_dir}


@pytest.mark.parametrize("name", ["HEADGATE_OPS_BIND", "HEADGATE_WORKER_ADDRESS", "HEADGATE_LOG_LEVEL"])
def test_o9_a_value_of_another_form_is_told_without_a_pattern(name, monkeypatch):
    for given, value in {**NEEDED, name: "no:such"}.items():
        monkeypatch.setenv(given, value)
    with pytest.raises(StartError) as refused:
        load_worker()
    assert name in str(refused.value)
    assert "pattern" not in str(refused.value)


def test_an_operator_must_know_at_most_25_settings_of_each_process():
    for process, settings in configuration.PROCESSES:
        known = configuration.MUST_KNOW[process]
        assert len(known) <= 25
        assert known <= settings.model_fields.keys()
