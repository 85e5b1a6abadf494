"""Adapters beside a model: tokens are those of transformers' model with the adapter merged into its weights."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from engine_driver import LINK, Driver
from fakes import generate_request
from safetensors.torch import load_file, save_file
from tiny_models import GREEDY, Driven, TinyModel, best_tokens, drive
from torch import nn

from workers.engine import loading
from workers.engine.device.runner import ModelRunner
from workers.engine.lora import adapters
from workers.engine.settings import WorkerSettings
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row
from workers.protocol.messages import SamplingParams

TinyModels = Callable[[str], TinyModel]
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_TOKENS = 10


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 301), k=length)


def write(
    directory: Path, reference: nn.Module, seed: int, modules: tuple[str, ...] = ALL, **config: object
) -> nn.Module:
    """An adapter as PEFT saves it; returns the model with it merged in."""
    directory.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    rank, generator = settings["r"], torch.Generator().manual_seed(seed)
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    merged, tensors = copy.deepcopy(reference), {}
    for path, module in merged.named_modules():
        if not path.endswith(modules):
            continue
        out_features, in_features = module.weight.shape
        down = torch.randn((rank, in_features), generator=generator) * 0.1
        up = torch.randn((out_features, rank), generator=generator) * 0.1
        module.weight += scale * up @ down
        tensors[f"base_model.model.{path}.lora_A.weight"] = down
        tensors[f"base_model.model.{path}.lora_B.weight"] = up
    save_file(tensors, directory / "adapter_model.safetensors")
    return merged


def expected(model: nn.Module, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    how = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist()


@dataclass
class Adapted(Driven):
    adapter: int = -1

    def row(self, chunk: int) -> Row:
        return replace(super().row(chunk), adapter=self.adapter)


def runner_of(model: TinyModel) -> ModelRunner:
    return model.runner(max_adapters=2, max_adapter_rank=8)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_adapters_mixed_in_one_batch_say_the_tokens_of_merged_weights(tiny_model: TinyModels, tmp_path, name):
    model = tiny_model(name)
    runner = runner_of(model)
    first = write(tmp_path / "a", model.reference, 1)
    second = write(tmp_path / "b", model.reference, 2, ("q_proj", "down_proj"), r=8, use_rslora=True)
    runner.loaded.adapters.load("a", tmp_path / "a")
    runner.loaded.adapters.load("b", tmp_path / "b")
    slots = runner.loaded.adapters.slots
    models = {-1: model.reference, slots["a"]: first, slots["b"]: second}
    kinds = [slots["a"], -1, slots["b"], slots["a"]]
    sequences = [Adapted(prompt_of(11 + index), arrival=2 * index, adapter=slot) for index, slot in enumerate(kinds)]
    drive(runner, sequences, NUM_TOKENS, chunk=7)
    for sequence in sequences:
        assert len(sequence.output) == NUM_TOKENS
        assert sequence.output == best_tokens(models[sequence.adapter], sequence.prompt, sequence.output)
    assert len({tuple(expected(m, prompt_of(11))) for m in models.values()}) == 3


def test_a_stream_is_the_same_alone_and_beside_other_adapters(tiny_model: TinyModels, tmp_path):
    model = tiny_model("llama")
    runner = runner_of(model)
    for seed, name in enumerate("ab"):
        write(tmp_path / name, model.reference, seed)
        runner.loaded.adapters.load(name, tmp_path / name)
    params = SamplingParams(seed=5, temperature=0.9, min_tokens=99)

    def stream(others: list[int]) -> list[int]:
        watched = Adapted(prompt_of(17), params, adapter=0)
        beside = [Adapted(prompt_of(5 + i), params, i, adapter=a) for i, a in enumerate(others)]
        drive(runner, [watched, *beside], NUM_TOKENS)
        return watched.output

    assert stream([]) == stream([1, -1, 0, 1])


def test_a_slot_is_used_again_and_nothing_of_the_one_before_is_left(tiny_model: TinyModels, tmp_path):
    model = tiny_model("llama")
    adapters = (runner := runner_of(model)).loaded.adapters
    write(tmp_path / "all", model.reference, 1)
    merged = write(tmp_path / "few", model.reference, 2, ("v_proj",), r=2)
    adapters.load("all", tmp_path / "all")
    adapters.unload("all")
    adapters.load("few", tmp_path / "few")
    assert adapters.slots == {"few": 0}
    sequence = Adapted(prompt_of(9), GREEDY, adapter=0)
    drive(runner, [sequence], NUM_TOKENS)
    assert sequence.output == expected(merged, prompt_of(9))


def refusal(runner: ModelRunner, name: str, directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        runner.loaded.adapters.load(name, directory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "needs use_dora"),
        ({"bias": "all"}, "needs bias"),
        ({"modules_to_save": ["lm_head"]}, "needs modules_to_save"),
        ({"peft_type": "IA3"}, "no LoRA adapter"),
        ({"r": 16}, "rank 16 is above 8"),
    ],
)
def test_what_is_not_done_is_refused_by_name(tiny_model: TinyModels, tmp_path, config, reason):
    model = tiny_model("llama")
    write(tmp_path / "a", model.reference, 1, **config)
    runner = runner_of(model)
    assert reason in refusal(runner, "a", tmp_path / "a")
    assert runner.loaded.adapters.slots == {}


def test_an_adapter_of_another_model_is_refused_and_leaves_nothing(tiny_model: TinyModels, tmp_path):
    write(tmp_path / "a", tiny_model("qwen2").reference, 1)
    runner = runner_of(tiny_model("llama"))
    assert "does not fit the model: shapes" in refusal(runner, "a", tmp_path / "a")
    for products in runner.loaded.adapters._sites:
        assert not any(site._shrink.any() or site._expand.any() for site in products.values())


def test_a_tensor_that_is_no_projection_is_refused(tiny_model: TinyModels, tmp_path):
    model = tiny_model("llama")
    write(tmp_path / "a", model.reference, 1)
    path = tmp_path / "a" / "adapter_model.safetensors"
    name = "base_model.model.lm_head.lora_A.weight"
    save_file(load_file(path) | {name: torch.zeros(4, 64)}, path)
    assert f"changes {name}" in refusal(runner_of(model), "a", tmp_path / "a")


def test_slots_are_bounded_and_names_unique(tiny_model: TinyModels, tmp_path):
    model = tiny_model("llama")
    runner = runner_of(model)
    write(tmp_path / "a", model.reference, 1)
    runner.loaded.adapters.load("a", tmp_path / "a")
    assert "loaded already" in refusal(runner, "a", tmp_path / "a")
    runner.loaded.adapters.load("b", tmp_path / "a")
    assert "no free slot" in refusal(runner, "c", tmp_path / "a")


def test_a_model_with_layers_of_its_own_takes_no_adapters(tiny_model: TinyModels):
    with pytest.raises(ModelError, match="layers are all of the Llama family"):
        runner_of(tiny_model("gemma2"))


def told(model: TinyModel, adapters: Path) -> WorkerSettings:
    return WorkerSettings(
        model=str(model.directory),
        engine_device="cpu",
        engine_num_blocks=48,
        engine_block_size=4,
        engine_adapters=adapters,
    )


def test_a_worker_serves_the_adapters_of_its_directory(tiny_model: TinyModels, tmp_path):
    model, folder = tiny_model("qwen2"), tmp_path / "adapters"
    folder.mkdir()
    merged = {name: write(folder / name, model.reference, i) for i, name in enumerate("ab")}
    runner = loading.load(told(model, folder))
    engine = Driver(runner)
    prompt = prompt_of(13)
    for name in ("a", "", "b"):
        given = {"adapter": name, "root": runner.root, "sampling": GREEDY}
        engine.send(generate_request(f"r{name}", prompt, NUM_TOKENS, **given))
    for _ in range(40):
        engine.step()
    for name in ("a", "", "b"):
        wanted = expected(merged.get(name, model.reference), prompt)
        assert engine.tokens[LINK, f"r{name}", 0] == wanted


def test_another_worker_goes_on_with_the_tokens_of_an_adapter(tiny_model: TinyModels, tmp_path):
    model = tiny_model("qwen2")
    write(tmp_path / "a", model.reference, 1)
    params = SamplingParams(seed=5, temperature=0.9, min_tokens=99, frequency_penalty=0.3)

    def outputs(adapter: str, **fields: object) -> list[list[int]]:
        runner = runner_of(model)
        runner.loaded.adapters.load("a", tmp_path / "a")
        engine = Driver(runner)
        given = {"adapter": adapter, "root": runner.root, "sampling": params, "num_choices": 2}
        engine.send(generate_request("r", prompt_of(13), NUM_TOKENS, **given | fields))
        engine.run().check_idle()
        return [engine.tokens[LINK, "r", index] for index in range(2)]

    whole = outputs("a")
    resume = tuple((index, tuple(tokens[:4])) for index, tokens in enumerate(whole))
    assert outputs("a", attempt=1, resume=resume, num_output_spent=8) == [tokens[4:] for tokens in whole]
    assert outputs("", attempt=1, resume=resume, num_output_spent=8) != [tokens[4:] for tokens in whole]


def test_a_directory_without_adapters_is_refused(tiny_model: TinyModels, tmp_path):
    with pytest.raises(ModelError, match="has no adapters"):
        loading.load(told(tiny_model("llama"), tmp_path))


def test_on_a_cpu_places_come_with_the_first_adapter(tiny_model: TinyModels, tmp_path):
    model = tiny_model("llama")
    merged = write(tmp_path / "a", model.reference, 1)
    runner = model.runner()
    before = sum(1 for _ in runner.loaded.model.modules())
    plain = Adapted(prompt_of(9), GREEDY)
    drive(runner, [plain], NUM_TOKENS)
    runner.add_adapter("a", runner.read_adapter(tmp_path / "a"))
    assert sum(1 for _ in runner.loaded.model.modules()) > before
    sequence, again = (
        Adapted(prompt_of(9), GREEDY, adapter=runner.adapters["a"].slot),
        Adapted(prompt_of(9), GREEDY, 2),
    )
    drive(runner, [sequence, again], NUM_TOKENS)
    assert sequence.output == expected(merged, prompt_of(9))
    assert again.output == plain.output
    runner.remove_adapter("a")
    assert runner.adapters == {}


def test_a_model_that_takes_no_adapters_says_so_when_it_is_given_one(tiny_model: TinyModels, tmp_path):
    write(tmp_path / "a", tiny_model("llama").reference, 1)
    runner = tiny_model("gemma2").runner()
    with pytest.raises(ModelError, match="layers are all of the Llama family"):
        runner.add_adapter("a", runner.read_adapter(tmp_path / "a"))
    without = tiny_model("llama").runner(max_adapters=0)
    with pytest.raises(ModelError, match="HEADGATE_ENGINE_MAX_ADAPTERS"):
        without.add_adapter("a", without.read_adapter(tmp_path / "a"))


def test_the_identity_is_that_of_the_weights(tiny_model: TinyModels, tmp_path):
    reference = tiny_model("llama").reference
    write(tmp_path / "a", reference, 1)
    write(tmp_path / "same", reference, 1)
    write(tmp_path / "louder", reference, 1, lora_alpha=16)
    write(tmp_path / "other", reference, 2)
    names = ("a", "same", "louder", "other")
    identities = [adapters.read(tmp_path / name).identity for name in names]
    assert identities[0] == identities[1]
    assert len(set(identities)) == 3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"r": 0}, "no sound configuration"),
        ({"lora_alpha": "loud"}, "no sound configuration"),
        ({"r": None}, "no sound configuration"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_sentence(tiny_model: TinyModels, tmp_path, damage, reason):
    write(tmp_path / "a", tiny_model("llama").reference, 1)
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ModelError, match=reason):
        adapters.read(tmp_path / "a")


def test_a_file_that_is_cut_off_or_missing_is_one_sentence(tiny_model: TinyModels, tmp_path):
    write(tmp_path / "a", tiny_model("llama").reference, 1)
    path = tmp_path / "a" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        adapters.read(tmp_path / "a")
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        adapters.read(tmp_path / "a")
