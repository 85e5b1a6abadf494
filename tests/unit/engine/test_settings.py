import pytest

from workers.engine import settings
from workers.engine.values.errors import StartError


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
        ("HEADGATE_WORKER_ADDRESS", "tcp:10.0.0.5:70000"),
        ("HEADGATE_THREADS", "0"),
        ("HEADGATE_OPS_BIND", "9400"),
        ("HEADGATE_ENGINE_DTYPE", "int3"),
        ("HEADGATE_ENGINE_LAG", "2"),
        ("HEADGATE_ENGINE_KV_DTYPE", "int4"),
        ("HEADGATE_ENGINE_QUANT", "int3"),
        ("HEADGATE_ENGINE_FUSE", "some"),
        ("HEADGATE_ENGINE_GRAPHS", "sometimes"),
        ("HEADGATE_ENGINE_MEMORY_SHARE", "1.5"),
        ("HEADGATE_ENGINE_UNHEARD_OF", "1"),
        ("HEADGATE_ENGINE_HOST_CACHE", "-1"),
        ("HEADGATE_ENGINE_PREEMPT", "never"),
        ("HEADGATE_ENGINE_POLICY", "random"),
        ("HEADGATE_ENGINE_SHARED_CACHE", "somewhere"),
        ("HEADGATE_ENGINE_DEVICE", "tpu"),
    ],
)
def test_a_wrong_value_or_an_unknown_name_is_named_in_one_sentence(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(StartError) as raised:
        settings.load()
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"KV_SPARSITY": "heavy"}, "^HEADGATE_ENGINE_KV_SPARSITY and HEADGATE_ENGINE_KV_BUDGET need each other"),
        ({"KV_BUDGET": "1024"}, "^HEADGATE_ENGINE_KV_SPARSITY and HEADGATE_ENGINE_KV_BUDGET need each other"),
        ({"KV_SPARSITY": "all", "KV_BUDGET": "1024"}, "HEADGATE_ENGINE_KV_SPARSITY = 'all': "),
        (
            {"KV_SPARSITY": "heavy", "KV_BUDGET": "64", "SPECULATE": "ngram"},
            "cannot be combined with HEADGATE_ENGINE_SPECULATE or",
        ),
        (
            {"KV_SPARSITY": "heavy", "KV_BUDGET": "64", "TENSOR_PARALLEL": "2"},
            "cannot be combined with HEADGATE_ENGINE_SPECULATE or",
        ),
    ],
)
def test_a_kv_budget_goes_with_its_policy_and_with_neither_guesses_nor_ranks(monkeypatch, told, reason):
    for name, value in told.items():
        monkeypatch.setenv(f"HEADGATE_ENGINE_{name}", value)
    with pytest.raises(StartError, match=reason):
        settings.load()


@pytest.mark.parametrize(("proposer", "draft"), [("draft", ""), ("ngram", "/models/draft")])
def test_a_draft_model_and_its_setting_need_each_other(monkeypatch, proposer, draft):
    monkeypatch.setenv("HEADGATE_ENGINE_SPECULATE", proposer)
    monkeypatch.setenv("HEADGATE_ENGINE_DRAFT_MODEL", draft)
    with pytest.raises(StartError, match=r"^HEADGATE_ENGINE_SPECULATE=draft and HEADGATE_ENGINE_DRAFT_MODEL "):
        settings.load()


def test_names_of_other_processes_are_not_ours_to_judge(monkeypatch):
    monkeypatch.setenv("HEADGATE_DATABASE_URL", "sqlite://")
    settings.load()


def test_more_running_sequences_than_a_step_has_tokens_is_refused(monkeypatch):
    monkeypatch.setenv("HEADGATE_ENGINE_MAX_RUNNING", "100")
    monkeypatch.setenv("HEADGATE_ENGINE_MAX_BATCH_TOKENS", "50")
    with pytest.raises(StartError, match=r"^HEADGATE_ENGINE_MAX_RUNNING must not be above HEADGATE_ENGINE_MAX_BATCH"):
        settings.load()


def test_settings_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        settings.load().slot = 3


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"PREEMPT": "swap"}, "HOST_CACHE"),
        ({"SHARED_CACHE": "/shared"}, "HOST_CACHE"),
        ({"SHARED_CACHE": "/shared", "HOST_CACHE": "1000", "BLOCK_SIZE": "48"}, "64"),
        ({"HOST_CACHE": "1000", "TENSOR_PARALLEL": "2"}, "TENSOR_PARALLEL"),
    ],
)
def test_tiers_need_what_is_below_them(monkeypatch, told, named):
    for name, value in told.items():
        monkeypatch.setenv(f"HEADGATE_ENGINE_{name}", value)
    with pytest.raises(StartError, match=named):
        settings.load()


def test_the_secret_of_the_shared_cache_is_drawn_once(tmp_path):
    from workers.engine.tiers.shared_cache.opening import read_secret

    path = tmp_path / "secrets" / "shared_cache.key"
    first = read_secret(path)
    assert len(first) == 32
    assert read_secret(path) == first
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"short")
    with pytest.raises(StartError, match="32"):
        read_secret(path)
