"""Models that take images beside text: the text model inside them, against transformers' own generate."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import _COMMON, Driven, drive
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.values.errors import ModelError

NUM_TOKENS, LENGTH = 24, 41
_TEXT = {name: value for name, value in _COMMON.items() if name != "tie_word_embeddings"}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PIXTRAL = {**_CLIP, "head_dim": 16}
_QWEN2_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}
_QWEN2_5_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 48,
    "fullatt_block_indexes": [0],
}
_QWEN3_VISION = {**_QWEN2_5_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
del _QWEN3_VISION["fullatt_block_indexes"]
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}

CONFIGS: dict[str, Callable[[bool], PreTrainedConfig]] = {
    "gemma3": lambda tied: transformers.Gemma3Config(
        text_config={
            **_TEXT,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        vision_config=_CLIP,
        mm_tokens_per_image=4,
        tie_word_embeddings=tied,
    ),
    "mistral3": lambda tied: transformers.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral", "head_dim": 32, "sliding_window": None},
        vision_config={**_PIXTRAL, "model_type": "pixtral"},
        tie_word_embeddings=tied,
    ),
    "qwen2_vl": lambda tied: transformers.Qwen2VLConfig(
        text_config={**_TEXT, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _AXES},
        vision_config=_QWEN2_VISION,
        tie_word_embeddings=tied,
    ),
    "qwen2_5_vl": lambda tied: transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _AXES},
        vision_config=_QWEN2_5_VISION,
        tie_word_embeddings=tied,
    ),
    "qwen3_vl": lambda tied: transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 32, "rope_parameters": {**_AXES, "mrope_interleaved": True}},
        vision_config=_QWEN3_VISION,
        tie_word_embeddings=tied,
    ),
}


def _save(name: str, directory: Path, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(sum(map(ord, name)))
    config = CONFIGS[name](tied)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model = model.eval().requires_grad_(False)
    model.save_pretrained(directory)
    return model


def _greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def _runner(directory: Path) -> ModelRunner:
    return ModelRunner(RunnerSettings(str(directory), num_blocks=48, block_size=4, device="cpu"))


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_model_inside_gives_the_wrappers_own_tokens(name: str, tied: bool, tmp_path: Path) -> None:
    reference = _save(name, tmp_path, tied)
    prompt = random.Random(LENGTH).choices(range(3, 301), k=LENGTH)
    sequence = Driven(prompt)
    drive(_runner(tmp_path), [sequence], NUM_TOKENS, chunk=16)
    assert sequence.output == _greedy(reference, prompt)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_a_checkpoint_with_the_names_of_transformers_5_is_the_same_model(name: str, tmp_path: Path) -> None:
    reference = _save(name, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    before = set(load_file(file))
    save_file(reference.state_dict(), file, metadata={"format": "pt"})
    assert before != set(load_file(file))
    sequence = Driven(random.Random(1).choices(range(3, 301), k=LENGTH))
    drive(_runner(tmp_path), [sequence], NUM_TOKENS)
    assert sequence.output == _greedy(reference, sequence.prompt)


def test_a_head_is_read_where_the_configuration_does_not_say_whether_it_is_tied(tmp_path: Path) -> None:
    reference = _save("mistral3", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    config["text_config"].pop("tie_word_embeddings", None)
    path.write_text(json.dumps(config))
    sequence = Driven(random.Random(1).choices(range(3, 301), k=LENGTH))
    drive(_runner(tmp_path), [sequence], NUM_TOKENS)
    assert sequence.output == _greedy(reference, sequence.prompt)


def test_a_tensor_of_no_known_part_is_refused(tmp_path: Path) -> None:
    _save("gemma3", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    save_file({**load_file(file), "model.sound_tower.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"a tensor model\.sound_tower\.weight that the model has no place for"):
        _runner(tmp_path)


def test_end_tokens_are_those_of_the_wrapper(tmp_path: Path) -> None:
    _save("gemma3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [5, 6]}))
    (tmp_path / "generation_config.json").unlink()
    assert _runner(tmp_path).eos_token_ids == (5, 6)
