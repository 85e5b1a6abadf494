"""From a model and a device to a plan."""

from __future__ import annotations

import pytest

from gateway.metering import leases
from workers.engine import settings
from workers.engine.sizing import sizing
from workers.engine.sizing.capacity import ModelSize, Served, longest_sequence
from workers.engine.sizing.devices import TABLE, Device, named
from workers.engine.sizing.plan_report import Report
from workers.engine.sizing.sizing import Asked, plan
from workers.engine.values.errors import ModelError

LLAMA_8B = Served(
    ModelSize.dense(
        {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
        }
    )
)
CPU = Device("cpu", 64 << 30, 40e9, 1e12, 0.2e12, 0.0, "a test", is_cpu=True)


def planned(name="h200", limit=131_072, **asked):
    return plan(LLAMA_8B, limit, "bfloat16", Asked(TABLE[name], **asked))


def test_blocks_are_what_weights_libraries_and_a_step_leave():
    found = planned()
    used = 0.9 * (139 << 30) - found.kv_bytes
    assert LLAMA_8B.weight_bytes + sizing.LIBRARIES < used < LLAMA_8B.weight_bytes + (5 << 30)
    assert found.fitting_blocks == found.kv_bytes // (16 * 131_072)
    assert found.num_blocks == found.fitting_blocks


def test_a_worker_takes_no_more_blocks_than_its_longest_sequences_can_use():
    found = planned(limit=64)
    assert found.num_blocks == 1 + 256 * 4 < found.fitting_blocks
    assert found.recommended.max_model_len == 64


def test_the_largest_batch_fills_the_blocks_and_its_rate_is_its_size_over_its_step():
    for each in planned(contexts=(1000, 8192)).contexts:
        per_sequence = -(-each.context // 16)
        left = planned().num_blocks - 1 - each.largest_batch * per_sequence
        assert 0 <= left < per_sequence
        assert each.full.bound == "memory" and each.prefill.bound == "compute"
        assert each.full_tokens_per_s * each.full.seconds == pytest.approx(each.largest_batch)
        assert each.tokens_per_s < each.full_tokens_per_s


def test_a_context_that_does_not_fit_beside_a_shorter_one_is_shown_with_a_batch_of_none():
    short, long = planned("l4", contexts=(1024, 131_072)).contexts
    assert short.largest_batch > 0
    assert long.largest_batch == 0 and long.full is None


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ModelError, match=r"needs 14.96 GiB for weights and 20.00 GiB for one seq"):
        planned("l4", contexts=(131_072,))


def test_a_context_behind_the_models_end_is_refused():
    with pytest.raises(ModelError, match="ends at 8192 tokens, not at 9000"):
        planned(limit=8192, contexts=(9000,))


def test_contexts_are_those_of_the_model_where_none_is_asked_for():
    assert sizing.contexts((), 10_000) == (1024, 8192)
    assert sizing.contexts((), 100) == (100,)
    assert sizing.contexts((300, 200, 300), 1000) == (200, 300)


def test_a_step_of_the_recommended_budget_is_short_and_not_below_the_knee():
    for name in TABLE:
        ceilings = TABLE[name].ceilings("bfloat16")
        tokens = sizing.batch_tokens(LLAMA_8B, ceilings)
        assert tokens >= LLAMA_8B.knee(ceilings) or tokens == sizing.MAX_BATCH_TOKENS
        half_is_below_the_knee = tokens // 2 < LLAMA_8B.knee(ceilings)
        assert LLAMA_8B.prefill_s(tokens, ceilings) <= sizing.STEP_S or half_is_below_the_knee


def test_a_cpu_gives_the_share_of_its_free_memory_that_a_worker_takes():
    found = plan(LLAMA_8B, 131_072, "float32", Asked(CPU))
    assert found.kv_bytes == 2 << 30
    small = Asked(Device("cpu", 20 << 30, 40e9, 1e12, 2e11, 0.0, "", is_cpu=True), contexts=(64,))
    left = (20 << 30) - LLAMA_8B.weight_bytes
    assert plan(LLAMA_8B, 131_072, "float32", small).kv_bytes == left // 10


def test_a_device_without_8_bit_floats_says_so():
    with pytest.raises(ModelError, match="a10 has no 8-bit floats"):
        TABLE["a10"].ceilings("bfloat16", "fp8")
    assert TABLE["l4"].ceilings("bfloat16", "fp8").linear_flops_per_s == 242e12


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(told, name):
    assert named(told) is TABLE[name]


@pytest.mark.parametrize("told", ["NVIDIA A10G", "NVIDIA L40", "Tesla T4", "NVIDIA GeForce RTX 3090"])
def test_a_device_like_another_is_not_taken_for_it(told):
    assert named(told) is None


def test_every_figure_names_its_source():
    for name, device in TABLE.items():
        assert device.name == name and device.source.startswith(("measured", "datasheet: NVIDIA"))


@pytest.mark.parametrize("name", TABLE)
def test_a_worker_can_be_started_with_the_recommended_settings(name, monkeypatch):
    asked = Asked(TABLE[name])
    given = {"MODEL": "m", "DTYPE": "bfloat16", "KV_DTYPE": "auto", "QUANT": "none"}
    found = plan(LLAMA_8B, 131_072, "bfloat16", asked)
    report = Report(LLAMA_8B, LLAMA_8B, 131_072, asked, found, given, "asked for")
    for key, value in report.settings().items():
        monkeypatch.setenv(key, str(value))
    told = settings.load()
    assert told.engine_max_model_len == found.recommended.max_model_len > 1024
    assert told.engine_max_running == found.recommended.max_running >= 1


def test_a_length_that_memory_bounds_leaves_a_little_for_what_a_worker_measures():
    found = planned("l4")
    longest = longest_sequence(found.num_blocks, 16)
    assert 0.9 * longest < found.recommended.max_model_len < 0.95 * longest


def test_the_lease_is_the_gateways():
    assert sizing.LEASE_TOKENS == leases.LEASE_TOKENS
    assert planned().recommended.lease_s == pytest.approx(128 * 3.49e-3, rel=5e-3)
