import pytest

from workers.engine import settings
from workers.engine.errors import StartError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("HEADGATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HEADGATE_MODEL", "/models/demo")


def test_only_the_model_has_to_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADGATE_HOME", str(tmp_path))
    monkeypatch.setenv("HEADGATE_SLOT", "2")
    told = settings.load()
    assert (told.worker, told.served_name) == ("worker-2", "demo")
    assert told.address == f"unix:{tmp_path}/run/worker-2.sock"
    assert told.journal_dir == tmp_path / "state/worker-2/journal"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADGATE_SLOT", "first"),
        ("HEADGATE_WORKER_ADDRESS", "somewhere"),
        ("HEADGATE_THREADS", "0"),
        ("HEADGATE_OPS_BIND", "9400"),
        ("HEADGATE_ENGINE_DTYPE", "int3"),
        ("HEADGATE_ENGINE_LAG", "2"),
        ("HEADGATE_ENGINE_KV_DTYPE", "int4"),
        ("HEADGATE_ENGINE_QUANT", "int3"),
        ("HEADGATE_ENGINE_GRAPHS", "sometimes"),
        ("HEADGATE_ENGINE_MEMORY_SHARE", "1.5"),
        ("HEADGATE_ENGINE_UNHEARD_OF", "1"),
    ],
)
def test_a_wrong_value_or_an_unknown_name_is_named_in_one_sentence(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(StartError) as raised:
        settings.load()
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("proposer", "draft"), [("draft", ""), ("ngram", "/models/draft")])
def test_a_draft_model_and_its_setting_need_each_other(monkeypatch, proposer, draft):
    monkeypatch.setenv("HEADGATE_ENGINE_SPECULATE", proposer)
    monkeypatch.setenv("HEADGATE_ENGINE_DRAFT_MODEL", draft)
    with pytest.raises(StartError, match="DRAFT_MODEL"):
        settings.load()


def test_names_of_other_processes_are_not_ours_to_judge(monkeypatch):
    monkeypatch.setenv("HEADGATE_DATABASE_URL", "sqlite://")
    settings.load()


def test_more_running_sequences_than_a_step_has_tokens_is_refused(monkeypatch):
    monkeypatch.setenv("HEADGATE_ENGINE_MAX_RUNNING", "100")
    monkeypatch.setenv("HEADGATE_ENGINE_MAX_BATCH_TOKENS", "50")
    with pytest.raises(StartError, match="MAX_RUNNING"):
        settings.load()


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        settings.load().slot = 3
