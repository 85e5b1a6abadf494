"""Smoothing: an identity in float64, refused where it has no place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from stored_models import log_probabilities, prompt_of, start
from tiny_models import TinyModel
from torch import nn

from gateway.cli.main import main as headgate
from workers.engine.model import smoothing
from workers.engine.values.errors import ModelError

TinyModels = Callable[[str], TinyModel]


def called(*told: object) -> Result:
    return CliRunner().invoke(headgate, ["calibrate", *(str(one) for one in told)], prog_name="headgate")


def calibrated(model: TinyModel, path: Path) -> Path:
    told = [str(model.directory), "--out", str(path), "--tokens", "20"]
    result = called(*told)
    assert result.exit_code == 0, result.output
    return path


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.tensor([prompt_of(30)])).logits


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_in_float64_it_changes_nothing_but_the_weights(tiny_model: TinyModels, tmp_path, name):
    tiny = tiny_model(name)
    statistics = smoothing.read(calibrated(tiny, tmp_path / "stats.safetensors"))
    model = copy.deepcopy(tiny.reference).double()
    expected, before = logits(model), copy.deepcopy(model.state_dict())
    smoothing.fold(model, statistics)
    torch.testing.assert_close(logits(model), expected, atol=1e-10, rtol=1e-10)
    changed = {n for n, tensor in model.state_dict().items() if not torch.equal(tensor, before[n])}
    assert {"q_proj", "up_proj", "input_layernorm"} <= {n.split(".")[-2] for n in changed}
    assert not any("down_proj" in name or "lm_head" in name for name in changed)


def test_a_worker_serves_it_under_another_root(tiny_model: TinyModels, tmp_path):
    tiny = tiny_model("llama")
    path = calibrated(tiny, tmp_path / "stats.safetensors")
    smooth, plain = (start(tiny.directory, quant="w8a8", smoothing=path), start(tiny.directory, quant="w8a8"))
    assert smooth.root != plain.root
    found, expected = log_probabilities(smooth, tiny.reference)
    assert 0 < (found - expected).abs().mean() < 0.4  # lossy, but of the same model


@pytest.mark.parametrize(("quant", "reason"), [("none", "set HEADGATE_ENGINE_QUANT too")])
def test_nothing_is_smoothed_that_is_not_rounded(tiny_model: TinyModels, tmp_path, quant, reason):
    with pytest.raises(ModelError, match=reason):
        start(tiny_model("llama").directory, quant=quant, smoothing=tmp_path / "any")


def test_statistics_of_another_model_and_no_statistics_are_refused(tiny_model: TinyModels, tmp_path):
    path = calibrated(tiny_model("llama"), tmp_path / "stats.safetensors")
    with pytest.raises(ModelError, match="not of this model"):
        start(tiny_model("phi3").directory, quant="w8a8", smoothing=path)
    with pytest.raises(ModelError, match="cannot be read"):
        start(tiny_model("llama").directory, quant="w8a8", smoothing=tmp_path / "none")


def refused(*told: object) -> str:
    result = called(*told)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert result.output.count("\n") == 1 and result.output.startswith("headgate: ")
    return result.output


def test_what_cannot_be_measured_or_written_is_one_sentence(tmp_path):
    model, out = TinyModel.make("llama", tmp_path / "model").directory, tmp_path / "stats"
    text = tmp_path / "text"
    assert "model directory /nowhere does not exist" in refused("/nowhere", "--out", out)
    missing = tmp_path / "none"
    assert f"{missing} does not exist" in refused(model, "--out", missing / "stats.safetensors")
    text.write_bytes(b"words")
    assert "no tokenizer.json" in refused(model, "--out", out, "--text", text)
    (model / "tokenizer.json").touch()
    text.write_bytes(b"\xd0 is not UTF-8")
    assert f"{text} is not UTF-8" in refused(model, "--out", out, "--text", text)
    assert not out.exists()


def test_a_wrong_line_is_one_sentence():
    said = called()
    assert said.exit_code == 2
    assert said.stderr == "headgate: Missing argument 'MODEL'. See `headgate calibrate --help`.\n"
    assert "Usage: headgate calibrate [OPTIONS] MODEL" in called("--help").stdout


def test_without_a_text_it_says_how_much_the_model_wrote(tiny_model: TinyModels, tmp_path):
    out = tmp_path / "stats.safetensors"
    told = [str(tiny_model("llama").directory), "--out", str(out)]
    said = called(*told, "--tokens", "20").output
    assert said == f"{out}: 6 norms over 20 tokens.\n"
