"""Checkpoints with quantized layers, written by hand, and the engine's logits against those of a reference."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import TinyModel
from torch import nn

from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.values.plan import Row


def wrapped(packed: torch.Tensor) -> torch.Tensor:
    return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32)


def write(directory: Path, model: TinyModel, settings: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    directory.mkdir(exist_ok=True)
    config = json.loads((model.directory / "config.json").read_text())
    config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def start(directory: Path, **settings: object) -> ModelRunner:
    given = {"num_blocks": 48, "block_size": 4, "device": "cpu", **settings}
    return ModelRunner(RunnerSettings(str(directory), **given))


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 301), k=length)


def check_logits(runner: ModelRunner, reference: nn.Module, atol: float = 1e-4) -> None:
    """Checks the logits of every token of a prompt."""
    found, expected = log_probabilities(runner, reference)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def log_probabilities(runner: ModelRunner, reference: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    prompt = prompt_of(40)
    (result,) = runner.execute([Row(prompt, 0, list(range(1, 11)), prompt_logprobs=0)])
    logits = reference(input_ids=torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    found = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    return found, expected
