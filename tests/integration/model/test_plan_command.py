"""`headgate plan` as a user runs it, and a worker's refusal beside the plan's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from load import stretched
from tiny_models import CONFIGS, TinyModel
from transformers import LlamaConfig, LlamaForCausalLM

from gateway.cli.main import main as headgate
from kernels.cpu import compiled
from workers.engine.commands import cpu_speed
from workers.engine.kv import kv_store
from workers.engine.values.errors import ModelError

DEMO = Path(__file__).resolve().parents[3] / "ops/demo_model/model"


def run(*arguments: str, **environment: str):
    return CliRunner().invoke(headgate, ["plan", *arguments], env=environment, prog_name="headgate")


@pytest.mark.parametrize("named", ["argument", "variable"])
def test_the_demo_model_is_known_by_the_name_under_which_it_is_served(named):
    """The name is no repository of the hub."""
    told = ("plan", *(["headgate-demo"] if named == "argument" else []), "--gpu", "h200")
    done = run(*told[1:], HEADGATE_MODEL="headgate-demo" if named == "variable" else "other/model")
    assert done.exit_code == 0, done.output
    assert "5,475,584" in done.output


def test_json_may_stand_in_front_of_the_command():
    done = CliRunner().invoke(headgate, ["--json", "plan", str(DEMO), "--gpu", "h200"], prog_name="headgate")
    assert json.loads(done.stdout)["model"]["parameters"] == 5_475_584


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Missing argument 'MODEL'."),
        (("m", "--gpu", "l5"), "Invalid value for '--gpu': 'l5' is not one of"),
        (("m", "--block-size", "x"), "Invalid value for '--block-size': 'x' is not a whole number from 1 to 256."),
        (("m", "--coffee"), "No such option '--coffee'"),
    ],
)
def test_a_wrong_line_is_one_sentence(arguments, sentence):
    done = run(*arguments)
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert line.startswith(f"headgate: {sentence}") and line.endswith(" See `headgate plan --help`.")


def test_what_cannot_be_served_is_an_object_where_json_was_asked_for():
    told = json.loads(run("/nowhere", "--gpu", "h200", "--json").stdout)["error"]
    assert (told["message"], told["status"]) == ("The model directory /nowhere does not exist.", 1)


@pytest.mark.rest
def test_a_process_of_its_own_prints_json_and_nothing_else():
    command = ["-c", "from gateway.cli.main import main; main()", "plan", str(DEMO)]
    done = subprocess.run(
        [sys.executable, *command, "--gpu", "h200", "--json", "--context", "500"],
        capture_output=True,
        text=True,
        timeout=stretched(55),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"]["parameters"] == 5_475_584
    assert told["model"]["kv_bytes_per_token"] == 2 * 6 * 2 * 64 * 2
    (at,) = told["contexts"]
    assert at["context"] == 500 and at["largest_bound"] == "memory"
    assert at["step_s"] == pytest.approx((told["model"]["weight_bytes"] + 500 * 3072) / 4.3e12)
    assert told["settings"]["HEADGATE_ENGINE_MAX_MODEL_LEN"] == 2048


def test_tables_name_every_figure_and_the_settings():
    done = run(str(DEMO), "--gpu", "l4", "--kv-dtype", "int8", "--quant", "int8")
    assert done.exit_code == 0, done.output
    for word in (
        "parameters",
        "5,475,584",
        "datasheet: NVIDIA L4",
        "KV",
        "1,632 bytes",
        "knee",
        "largest batch",
        "HEADGATE_ENGINE_KV_DTYPE=int8",
        "HEADGATE_ENGINE_QUANT=int8",
        "MAX_RUNNING=",
        "lease",
    ):
        assert word in done.output


def test_figures_of_a_device_can_be_given():
    given = ("--memory-gib", "2", "--bandwidth-gb", "100", "--tflops", "5")
    told = json.loads(run(str(DEMO), "--gpu", "h200", *given, "--json").output)
    device = told["device"]
    assert (device["memory"], device["bytes_per_s"], device["flops_per_s"]) == (2 << 30, 1e11, 5e12)
    assert told["knee_tokens_per_step"] == pytest.approx(50, rel=0.01)


def test_settings_of_a_worker_are_read_from_its_variables():
    told = run(str(DEMO), "--gpu", "l4", "--json", HEADGATE_ENGINE_QUANT="int8").output
    assert json.loads(told)["settings"]["HEADGATE_ENGINE_QUANT"] == "int8"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("/nowhere",), "The model directory /nowhere does not exist."),
        ((str(DEMO), "--gpu", "a10", "--kv-dtype", "fp8"), "The device a10 has no 8-bit floats"),
        ((str(DEMO), "--context", "4096"), "ends at 2048 tokens"),
        ((str(DEMO), "--tensor-parallel", "3"), "cannot be split over 3 ranks"),
        ((str(DEMO), "--memory-gib", "1"), "needs 10.44 MiB for weights and 3.80 MiB for one"),
    ],
)
def test_what_cannot_be_served_is_one_sentence_and_a_status(arguments, sentence):
    done = run("--gpu", "h200", *arguments)
    assert done.exit_code == 1
    assert done.output.count("\n") == 1 and done.output.startswith("headgate: ")
    assert sentence in done.output


def test_a_worker_refuses_with_the_numbers_of_the_plan(tmp_path, monkeypatch):
    """In a memory of 3 MiB beside its weights, of which a tenth is for KV."""
    model = TinyModel.make("llama", tmp_path)
    weights = sum(p.numel() for p in model.reference.parameters()) * 4
    free = weights + (3 << 20)
    speed = cpu_speed.measure()
    planned = dataclasses.replace(speed, memory=free)
    monkeypatch.setattr(cpu_speed, "measure", lambda num_ranks: planned)
    monkeypatch.setattr(kv_store, "available_bytes", lambda: 3 << 20)
    said = run(str(tmp_path), "--gpu", "cpu", "--block-size", "4", "--context", "250")
    with pytest.raises(ModelError) as refused:
        model.runner(num_blocks=None, max_model_len=250)
    assert said.exit_code == 1
    assert said.output == f"headgate: {refused.value}\n"
    assert "one sequence of 250 tokens" in said.output
    model.runner(num_blocks=None, max_model_len=64)
    model.runner(num_blocks=None)  # told no length, it serves what fits


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3",
        *[pytest.param(name, marks=pytest.mark.rest) for name in ("phi3", "gpt2", "gpt_neox", "mixtral", "qwen3_moe")],
    ],
)
def test_what_computes_the_layers_is_what_a_worker_says_at_its_start(name, tmp_path, caplog):
    model = TinyModel.make(name, tmp_path)
    with caplog.at_level("INFO"):
        model.runner()
    (told,) = [record for record in caplog.records if getattr(record, "event", "") == "cpu_path"]
    plan = json.loads(run(str(tmp_path), "--gpu", "cpu", "--json").output)
    assert (plan["cpu_path"], plan["cpu_layers"]) == (told.products, told.layers)
    assert ("one compiled call" in told.layers) is (name != "qwen3_moe" and not compiled.refusal())


@pytest.mark.rest
def test_a_cpu_is_measured():
    device = cpu_speed.measure()
    assert device.is_cpu and device.memory > 1 << 20
    assert 1e8 < device.bytes_per_s < 1e13
    assert 1e8 < device.float32_flops_per_s < 1e15 and 1e7 < device.flops_per_s < 1e15
    half = cpu_speed.measure(num_ranks=1000)
    assert half.bytes_per_s < device.bytes_per_s / 50


def test_a_hub_id_costs_its_configuration_only(monkeypatch, tmp_path):
    from workers.engine.checkpoint import checkpoint

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2"]().to_dict()))
    asked = []
    monkeypatch.setattr(
        checkpoint,
        "snapshot_download",
        lambda name, allow_patterns, ignore_patterns: asked.append((name, allow_patterns)) or tmp_path,
    )
    done = run("someone/qwen", "--gpu", "l4", "--json")
    assert json.loads(done.output)["model"]["parameters"] == 131_520, done.output
    assert set(map(str, asked)) == {"('someone/qwen', ['*.json'])"}


@pytest.mark.rest
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_workers_process_takes_what_the_plan_says(tmp_path, dtype):
    """Within a tenth, once all of its KV was written: nothing is held twice, and no file of the checkpoint is kept."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    code = f"""
import json, torch
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.values.plan import Row
runner = ModelRunner(RunnerSettings({str(tmp_path)!r}, device="cpu", dtype="auto", kv_memory=300 << 20, num_threads=1))
with torch.inference_mode():
    runner.store.tensor.zero_()
runner.execute([Row([1] * 512, 0, list(range(1, 33)))])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
kv, weights = runner.store.tensor.nbytes, runner._weights
print(json.dumps([kv, weights, 1024 * int(status["VmRSS"].split()[0])]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    kv, weights, taken = json.loads(done.stdout.splitlines()[-1])
    told = json.loads(run(str(tmp_path), "--gpu", "cpu", "--json").output)["memory"]
    blocks = told["num_blocks"] * told["kv_bytes_per_token"] * told["block_size"]
    assert told["weight_bytes"] == weights
    assert taken == pytest.approx(told["process_bytes"] - blocks + kv, rel=0.1)
