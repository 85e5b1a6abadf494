"""headgate.toml: where it is found, what it means, and what is wrong with it in one sentence."""

from __future__ import annotations

import json
import os
import re
import tomllib

import pytest
from click.testing import CliRunner

from accounting.values.setting_rows import read as setting_rows
from gateway.base.home import Home, HomeError
from gateway.base.settings import GatewaySettings, SettingsError
from gateway.base.settings import load as load_gateway
from gateway.cli import config_commands, configuration, up
from gateway.cli import main as cli
from gateway.cli.first_prices import first_rates
from gateway.cli.model import ServedModel
from gateway.cli.options import option, without
from gateway.configuration import model_sources
from gateway.configuration.file import read
from gateway.configuration.place import CONFIG, CONFIG_NAMES, find
from workers.engine.settings import load as load_worker
from workers.jobs.base.settings import load as load_jobs
from workers.process import refused_settings, setting_forms

FILE = """
port = 8099
drain_s = 3
trusted_networks = ["10.0.0.0/8", "10.1.0.0/16"]
invoice_automatic = true
database_url = "postgresql+psycopg://u:pw@h/d"

[models.big]
path = "/models/big"
replicas = 2
max_model_len = 4096
aliases = ["gpt-4o"]
fallbacks = ["small"]
engine_max_running = 8
price = { input = 0.5, cached = 0.05, output = 2 }

[models.small]
path = "org/small"
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose commands leave the test's own environment as it was."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("HEADGATE_") and "TEST" not in name]:
        del os.environ[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    os.environ.clear()
    os.environ.update(before)


def write(home, text: str = FILE):
    path = home / "headgate.toml"
    path.write_text(text)
    return path


def run(home, *arguments, **env):
    before = dict(os.environ)
    done = CliRunner().invoke(cli.main, [*arguments, "--home", str(home)], env=env)
    os.environ.clear()
    os.environ.update(before)
    return done


def test_the_file_of_the_home_comes_before_that_of_the_working_directory(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    assert find(home, here) is None
    (here / "headgate.toml").touch()
    assert find(home, here) == here / "headgate.toml"
    (home / "headgate.toml").touch()
    assert find(home, here) == home / "headgate.toml"
    assert find(home, here, str(tmp_path / "other")) == tmp_path / "other"


def test_an_option_is_found_wherever_it_stands():
    assert option(["up", "--config", "x"], "--config") == option(["--config=x", "up"], "--config") == "x"
    assert option(["up", "--config"], "--config") is None
    assert without(["--config", "x", "up", "--port=1"], "--config") == ["up", "--port=1"]


def test_settings_become_variables_and_models_tables(tmp_path):
    file = read(write(tmp_path))
    assert file.variables == {
        "HEADGATE_PORT": "8099",
        "HEADGATE_DRAIN_S": "3",
        "HEADGATE_TRUSTED_NETWORKS": "10.0.0.0/8,10.1.0.0/16",
        "HEADGATE_INVOICE_AUTOMATIC": "true",
        "HEADGATE_DATABASE_URL": "postgresql+psycopg://u:pw@h/d",
    }
    big = file.models["big"]
    assert big.source == {"max_model_len": 4096, "aliases": ("gpt-4o",), "fallbacks": ("small",)}
    assert big.added_to({CONFIG_NAMES: "HEADGATE_PORT"}) == {
        "HEADGATE_ENGINE_MAX_RUNNING": "8",
        "HEADGATE_ENGINE_MAX_MODEL_LEN": "4096",
        CONFIG_NAMES: "HEADGATE_PORT,HEADGATE_ENGINE_MAX_RUNNING,HEADGATE_ENGINE_MAX_MODEL_LEN",
    }


def test_a_variable_wins_over_the_file_and_a_flag_over_both(home, monkeypatch):
    write(home)
    Home(home).prepare()  # whether it may draw its key files, the database would be asked
    given = []

    async def starts(options):
        given.append((options.port, os.environ["HEADGATE_DRAIN_S"], [model.id for model in options.models]))

    monkeypatch.setattr(up, "run", starts)
    assert run(home, "up").exit_code == 0
    assert run(home, "up", HEADGATE_PORT="1", HEADGATE_DRAIN_S="4").exit_code == 0
    assert run(home, "up", "--port", "2", "--model", "small", HEADGATE_PORT="1").exit_code == 0
    assert given[0] == (8099, "3", ["big", "small"])
    assert given[1] == (1, "4", ["big", "small"])
    assert given[2][0::2] == (2, ["small"])


def test_the_models_of_the_file_are_served_with_their_settings(tmp_path):
    file = read(write(tmp_path))
    big, small = configuration.wanted(file, ())
    assert (big.location, big.id, big.num_workers) == ("/models/big", "big", 2)
    assert (small.location, small.id, small.num_workers) == ("org/small", "small", 1)
    assert big.env["HEADGATE_ENGINE_MAX_RUNNING"] == "8"
    rates = first_rates(ServedModel("big", tmp_path, big))
    assert (rates["interactive"].cache_read, rates["interactive"].output) == (50_000, 2_000_000)
    assert rates["batch"].output == 1_000_000
    (alone,) = configuration.wanted(file, ["big"])
    assert alone.told["fallbacks"] == []  # a fallback that is not served is none


def test_a_worker_is_one_of_the_files_models(tmp_path):
    file = read(write(tmp_path))
    env = configuration.worker_env(file, "big")
    assert (env["HEADGATE_MODEL"], env["HEADGATE_MODEL_ID"]) == ("/models/big", "big")
    assert configuration.worker_env(file, "/other") == {"HEADGATE_MODEL": "/other"}
    with pytest.raises(HomeError, match="name one with --model, big or small"):
        configuration.worker_env(file, None)


def test_a_gateway_reads_the_models_from_the_same_file(tmp_path):
    found = model_sources.of(GatewaySettings(home=tmp_path, models_file=write(tmp_path)))
    assert found["big"].path == "/models/big"
    assert found["big"].aliases == ("gpt-4o",)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("drain_ss = 3", "drain_ss in {} is not a setting. Did you mean drain_s?"),
        ("HEADGATE_DRAIN_S = 3", "HEADGATE_DRAIN_S in {} is not a setting. Write drain_s."),
        ("slot = 3", "slot in {} is not a setting. It differs between processes"),
        ("model = 'x'", "model in {} is not a setting. Models are tables"),
        ("coffee = 3", "coffee in {} is not a setting. `headgate config example` shows all of them."),
        ("drain_s = 2026-01-01", "drain_s in {} must be a number, a text, true or false, or a list of texts."),
        ("[drain_s]", "drain_s in {} must be a number"),
        ("models = 3", "models in {} must be tables like"),
        ("[models.a]", "models.a in {} has no path, which every model needs."),
        (
            "[models.a]\npath = '/x'\ntool_format = 'qwen9'",
            "models.a.tool_format: must be one of hermes, qwen3_coder, ",
        ),
        ("[models.a]\npath = 3", "models.a.path: input should be a valid string, not '3' (in {})."),
        (
            "[models.a]\npath = '/x'\nreplicas = 0",
            "models.a.replicas: input should be greater than or equal to 1, not '0'",
        ),
        ("[models.a]\npath = '/x'\nalias = ['b']", "models.a.alias in {} is not a setting. Did you mean aliases?"),
        ("[models.a]\npath = '/x'\ndrain_s = 3", "models.a.drain_s in {} is not a setting."),
        (
            "[models.a]\npath = '/x'\nprice = { input = 1 }",
            "models.a in {} has no price.output, which every model needs.",
        ),
        ("[models.'a b']\npath = '/x'", "The model name 'a b' in {} must have 1 to 256 characters and no space."),
        ("a = [", "The file {} is not TOML: "),
        (
            "drain_s = 'soon'",
            "Cannot use the setting drain_s of {} (HEADGATE_DRAIN_S) = 'soon': it should be a valid number",
        ),
        (
            "[models.a]\npath = '/x'\nfallbacks = ['b']",
            "The model a has the fallback b, which is not served. A fallback is the name of another served model.",
        ),
    ],
)
def test_a_fault_is_one_sentence_and_status_78(home, text, sentence):
    path = write(home, text)
    done = run(home, "config", "check")
    assert done.exit_code == 78, done.output
    assert done.output.startswith("headgate: " + sentence.format(path)), done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "tenants"])
def test_every_command_refuses_a_file_with_a_fault(home, command):
    write(home, "drain_ss = 3")
    done = run(home, command)
    assert (done.exit_code, "Did you mean drain_s?" in done.output) == (78, True)


def test_settings_of_workers_are_checked_by_the_worker(home):
    path = write(home, "[models.a]\npath = 'x/y'\nengine_max_running = 'x'")
    done = run(home, "config", "check")
    assert done.exit_code == 78
    assert f"models.a: Cannot use the setting engine_max_running of {path}" in done.output


def test_a_variable_that_nobody_knows_is_a_fault(home):
    done = run(home, "config", "check", HEADGATE_DRAIN_SS="3")
    assert (done.exit_code, "Did you mean HEADGATE_DRAIN_S?" in done.output) == (78, True)


def test_a_directory_in_place_of_the_file_is_not_passed_over(home):
    (home / "headgate.toml").mkdir()
    done = run(home, "config", "check")
    assert done.exit_code == 78
    assert f"The file {home / 'headgate.toml'} cannot be read: Is a directory." in done.output


def test_a_directory_that_is_none_is_a_fault(home):
    write(home)
    done = run(home, "config", "check")
    assert done.exit_code == 78
    assert "models.big.path is /models/big, which is not a directory with a config.json" in done.output


def test_a_relative_path_is_that_of_the_file(tmp_path):
    assert read(write(tmp_path, "[models.a]\npath = './m'")).models["a"].told.path == str(tmp_path / "m")


def test_a_good_file_is_said_to_be_good(home):
    path = write(home, FILE.replace("/models/big", "org/big"))
    done = run(home, "config", "check")
    assert (done.exit_code, done.output) == (0, f"{path}: the settings and 2 models can be used.\n")


def test_what_is_shown_has_value_unit_and_origin_and_no_secret(home):
    path = write(home)
    done = run(home, "config", "show", HEADGATE_DRAIN_S="4")
    assert f"HEADGATE_PORT = 8099  ({path})\n" in done.output
    assert "HEADGATE_DRAIN_S = 4 seconds  (environment)\n" in done.output
    assert "u:***@h/d" in done.output
    assert "pw" not in done.output
    assert "HEADGATE_BODY_S" not in done.output
    found = json.loads(run(home, "config", "show", "--all", "--json", HEADGATE_API_KEY="hg_x").output)
    by_name = {one["name"]: one for one in found["settings"]}
    assert by_name["HEADGATE_BODY_S"] == {
        "name": "HEADGATE_BODY_S",
        "value": "30.0",
        "unit": "seconds",
        "from": "default",
    }
    assert by_name["HEADGATE_API_KEY"]["value"] == "***"
    assert found["models"]["big"]["engine_max_running"] == "8"


def _example():
    """Returns the lines of the example's settings without their sign of a comment, and those of its model."""
    text = CliRunner().invoke(cli.main, ["config", "example"]).output
    assert tomllib.loads(text) == {}
    settings, models = (
        [line[2:] for line in part.splitlines() if re.match(r"# [a-z0-9_]+ = ", line)]
        for part in text.split("# [models.demo]")
    )
    return settings, models


def _faults_here(home, text):
    """Returns what the command and the gateway say of a file, in this process; the others are asked for the whole."""
    file = read(write(home, text))
    environ = {"HEADGATE_HOME": str(home), **file.added_to({})}
    found = [one.message for one in refused_settings.refused(setting_forms.COMMANDS, environ)]
    needed = {"HEADGATE_URL": "http://h", "HEADGATE_BROKER_URL": "memory://", "HEADGATE_MODEL": "m"}
    for load in (load_gateway, load_jobs):
        load({**needed, **environ})
    os.environ.update({**needed, **environ})
    load_worker()
    for name in environ:
        del os.environ[name]
    return found


def test_the_example_is_a_file_and_every_line_of_it_is_one_too(home):
    settings, models = _example()
    assert len(settings) > 80
    for line in settings:
        assert _faults_here(home, line) == [], line
    for line in models:
        path = "" if line.startswith("path") else 'path = "org/name"\n'
        assert _faults_here(home, f"[models.demo]\n{path}{line}") == [], line


def test_the_whole_example_can_be_used(home):
    settings, models = _example()
    write(home, "\n".join([*settings, "[models.demo]", *models]))
    done = run(home, "config", "check", "--json")
    assert (done.exit_code, json.loads(done.output)) == (0, {"ok": True, "problems": []}), done.output


def test_the_check_lists_every_fault_as_json_before_and_after_the_command(home):
    path = write(home, "port = 99999\nlog_form = 'xml'")
    for words in (("config", "check", "--json"), ("--json", "config", "check")):
        done = run(home, *words)
        found = json.loads(done.output)
        assert (done.exit_code, found["ok"]) == (78, False)
        assert [(one["setting"], one["source"], one["value"]) for one in found["problems"]] == [
            ("HEADGATE_PORT", str(path), "99999"),
            ("HEADGATE_LOG_FORM", str(path), "xml"),
        ]
        assert found["problems"][0]["message"].startswith(f"Cannot use the setting port of {path}")


def test_the_check_lists_every_fault_of_the_files_form(home):
    path = write(
        home, "drain_ss = 3\nlog_forms = 'xml'\n[models.a]\nreplicas = 2\n[models.b]\npath = '/x'\nalias = ['c']"
    )
    done = run(home, "config", "check", "--json")
    found = json.loads(done.output)["problems"]
    assert done.exit_code == 78
    assert [(one["setting"], one["source"]) for one in found] == [
        (name, str(path)) for name in ("drain_ss", "log_forms", "models.a.path", "models.b.alias")
    ]


def test_up_refuses_what_the_check_refuses_and_an_empty_url_is_not_set(home, monkeypatch):
    given = []

    async def starts(options):
        given.append(options.redis_url)

    monkeypatch.setattr(up, "run", starts)
    for command in (("config", "check"), ("up",)):
        done = run(home, *command, HEADGATE_GATEWAYS="-1")
        assert (done.exit_code, "HEADGATE_GATEWAYS = '-1': it should be a whole number" in done.output) == (78, True)
    assert run(home, "up", HEADGATE_REDIS_URL="").exit_code == 0
    assert given == [None]


def test_backticks_of_a_default_stay(home):
    done = run(home, "config", "show", "--all")
    assert "HEADGATE_LOG_FORM = `text` on a terminal, else `json`  (default)\n" in done.output


def test_every_row_has_a_text():
    assert all(row.text and row.process for row in setting_rows())
    assert {"HEADGATE_DRAIN_S", "HEADGATE_ENGINE_QUANT", "replicas"} <= {row.name for row in setting_rows()}


def test_a_file_that_is_named_and_missing_is_a_fault(home):
    done = CliRunner().invoke(cli.main, ["tenants", "--config", str(home / "none.toml")])
    assert (done.exit_code, "cannot be read: No such file" in done.output) == (78, True)
    with pytest.raises(SettingsError):
        configuration.load(home / "none.toml", {CONFIG: "x"})
    assert config_commands.COMMANDS
