"""What a jobs process is told."""

from __future__ import annotations

import os
import warnings

import pytest
from celery.exceptions import CPendingDeprecationWarning, SecurityWarning

from workers.jobs import __main__ as process
from workers.jobs.base import settings
from workers.jobs.base.app import create_celery, leave_out_advice

GOOD = {
    "HEADGATE_HOME": "/nowhere",
    "HEADGATE_URL": "http://127.0.0.1:8080/",
    "HEADGATE_BROKER_URL": "redis://x/1",
    "HEADGATE_SLOT": "3",
}


def test_names_of_other_processes_are_left_to_them():
    loaded = settings.load(GOOD)
    assert loaded.url == "http://127.0.0.1:8080"
    assert loaded.sql_url == "sqlite+aiosqlite:////nowhere/headgate.db"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"HEADGATE_URL": ""}, "HEADGATE_URL"),
        ({"HEADGATE_URL": "unix:/x"}, "HEADGATE_URL"),
        ({"HEADGATE_JOBS_CONCURRENCY": "none"}, "HEADGATE_JOBS_CONCURRENCY"),
        ({"HEADGATE_TEST_TIME_SCALE": "2"}, "HEADGATE_TEST_TIME_SCALE"),
    ],
)
def test_a_bad_value_is_one_sentence_with_the_variables_name(change, name):
    with pytest.raises(settings.SettingsError, match=name):
        settings.load(GOOD | change)


def test_a_missing_variable_is_named_with_what_to_set_it_to():
    with pytest.raises(settings.SettingsError, match=r"HEADGATE_BROKER_URL is not set\. Set it to the broker"):
        settings.load({k: v for k, v in GOOD.items() if "BROKER" not in k})


def test_a_start_without_a_setting_says_whose_it_is(monkeypatch, capsys):
    monkeypatch.setattr(process.logs, "configure", lambda *_: None)
    for name in [name for name in os.environ if name.startswith("HEADGATE_")]:
        monkeypatch.delenv(name)
    assert process.main() == os.EX_CONFIG
    assert capsys.readouterr().err.startswith("headgate jobs: The environment variable HEADGATE_")


def test_unreadable_and_short_keys_are_named(tmp_path):
    loaded = settings.load(GOOD | {"HEADGATE_HOME": str(tmp_path)})
    with pytest.raises(settings.SettingsError, match="Cannot read"):
        loaded.secret("pepper")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/pepper").write_bytes(b"short")
    with pytest.raises(settings.SettingsError, match="too short"):
        loaded.secret("pepper")


def test_celery_takes_json_only_keeps_no_results_and_its_times_are_in_order():
    with create_celery(settings.load(GOOD)) as app:
        conf = app.conf
        assert conf.accept_content == ["json"]
        assert conf.task_ignore_result
        assert conf.result_backend is None
        assert 120 < settings.SOFT_LIMIT_S < settings.HARD_LIMIT_S < conf.visibility_timeout
        assert (conf.task_soft_time_limit, conf.task_time_limit) == (None, None), "children limit their own time"
        assert conf.broker_transport_options["visibility_timeout"] == conf.visibility_timeout
        assert not conf.worker_enable_remote_control


def test_advice_of_celery_that_no_operator_can_follow_is_in_no_log():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        leave_out_advice()
        for category in (SecurityWarning, CPendingDeprecationWarning, UserWarning):
            warnings.warn("x", category, stacklevel=1)
    assert [one.category for one in told] == [UserWarning]
