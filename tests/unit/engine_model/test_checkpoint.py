"""What is refused before and while a model is read, each with one sentence; the identity of what is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, TinyModel
from transformers import PreTrainedConfig

from workers.engine.checkpoint import checkpoint
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.values.errors import ModelError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    return TinyModel.make("llama", directory).directory


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "model")


def start(model: Path | str, **settings: object) -> ModelRunner:
    return ModelRunner(RunnerSettings(str(model), **{"num_blocks": 8, "device": "cpu"} | settings))


def refusal(model: Path | str, **settings: object) -> str:
    with pytest.raises(ModelError) as caught:
        start(model, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".") or ": " in text
    return text


def edit_json(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing")


def test_a_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "neither a directory nor a hub model" in refusal("nobody-here/no-such-model")


def test_a_file_instead_of_a_directory(model: Path) -> None:
    assert "is a file" in refusal(model / "config.json")


def test_a_directory_without_a_configuration(model: Path) -> None:
    (model / "config.json").unlink()
    assert "no config.json" in refusal(model)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"model_type": "no-such-type"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_broken_configuration(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert "config.json" in refusal(model)


def test_a_configuration_that_contradicts_itself(model: Path) -> None:
    edit_json(model / "config.json", num_attention_heads=0, head_dim=None)
    assert "configuration" in refusal(model)


def test_remote_code_is_never_run(model: Path) -> None:
    (model / "modeling_own.py").write_text("raise SystemExit('this code was run')")
    edit_json(
        model / "config.json",
        model_type="own",
        auto_map={"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"},
    )
    assert "config.json" in refusal(model)


def test_a_checkpoint_that_can_hold_code(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert "no .safetensors file" in refusal(model)


def test_a_torn_weight_file(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot be read" in refusal(model)


def test_a_pointer_of_git_lfs_instead_of_weights(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n")
    assert f"{path} is not whole (a pointer of git-lfs?)" in refusal(model)


def test_weights_in_the_makers_own_form_beside_those_of_the_index_are_not_read(tmp_path: Path) -> None:
    reference = TinyModel.make("llama", tmp_path / "whole").reference
    model = tmp_path / "sharded"
    reference.save_pretrained(model, max_shard_size="100KB")
    assert len(list(model.glob("model-*.safetensors"))) > 1
    root = start(model).root
    save_file({"tok_embeddings.weight": torch.zeros(2)}, model / "consolidated.safetensors")
    assert start(model).root == root


def change_weights(model: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(model / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, model / "model.safetensors")


def test_a_missing_tensor(model: Path) -> None:
    change_weights(model, **{"model.layers.1.mlp.up_proj.weight": None})
    assert "lacks 1 tensors, the first is model.layers.1.mlp.up_proj.weight" in refusal(model)


def test_a_tensor_too_many(model: Path) -> None:
    change_weights(model, **{"model.layers.7.mlp.up_proj.weight": torch.zeros(2)})
    assert "model.layers.7.mlp.up_proj.weight that the model has no place for" in refusal(model)


def test_a_tensor_of_another_shape(model: Path) -> None:
    change_weights(model, **{"model.norm.weight": torch.zeros(2)})
    assert "model.norm.weight has shape [2], but the model needs [64]" in refusal(model)


def test_tied_tensors_that_differ(tmp_path: Path) -> None:
    model = TinyModel.make("llama-tied-biased", tmp_path / "tied").directory
    start(model)
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(model, **{"lm_head.weight": embedding.clone()})
    start(model)
    change_weights(model, **{"lm_head.weight": embedding + 1})
    assert "is tied to another one" in refusal(model)


def test_old_derived_tensors_are_ignored(model: Path) -> None:
    change_weights(model, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    start(model)


def test_the_masks_of_old_gpt_2_checkpoints_are_ignored(tmp_path: Path) -> None:
    model = TinyModel.make("gpt2", tmp_path / "gpt2").directory
    change_weights(model, **{"transformer.h.0.attn.masked_bias": torch.ones(1), "h.1.attn.bias": torch.ones(1)})
    start(model)


def test_weights_saved_without_the_head_s_prefix_are_found(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, model / "model.safetensors")
    start(model)


def test_a_tokenizer_larger_than_the_vocabulary(model: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 301}}, "added_tokens": []}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "token id 301, but the model has only 301 tokens" in refusal(model)


def test_an_added_token_beyond_the_vocabulary_is_told_and_served_without(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma's text models have the token of an image, and no row for it."""
    added = [{"id": number, "content": f"<{number}>"} for number in (300, 301)]
    tokenizer = {"model": {"vocab": {"a": 0, "b": 300}}, "added_tokens": added}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    start(model)
    assert [record.token_ids for record in caplog.records if getattr(record, "event", "") == "tokens_not_served"] == [
        [301]
    ]


def save_config(config: PreTrainedConfig, directory: Path) -> Path:
    config.save_pretrained(directory)
    (directory / "model.safetensors").write_bytes(b"never read")
    return directory


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.BloomConfig(), "attention interface"),
        (transformers.FalconConfig(alibi=True), "ALiBi"),
        (transformers.MambaConfig(), "layers of type linear_attention"),
        (transformers.BertConfig(is_decoder=True, add_cross_attention=True), "encoder-decoder"),
        (transformers.ViTConfig(), "no causal language model"),
        (transformers.MllamaConfig(), "more than text"),
        (transformers.Llama4TextConfig(), "layers of type chunked_attention"),
        (transformers.Qwen3NextConfig(), "layers of type linear_attention"),
        (transformers.LlamaConfig(quantization_config={"quant_method": "aqlm", "bits": 2}), "quantized (aqlm)"),
        (
            transformers.Qwen2Config(
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
            ),
            "several axes",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_architecture_that_cannot_be_run_right(tmp_path: Path, config: PreTrainedConfig, reason: str) -> None:
    """Refused from the configuration alone: the weights are never opened."""
    assert reason in refusal(save_config(config, tmp_path))


def test_a_head_size_that_no_kernel_has(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.head_dim = 24
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "head size 24" in refusal(tmp_path)


def test_frequencies_that_depend_on_the_running_length_limit_the_context(tmp_path: Path) -> None:
    config = CONFIGS["phi3"]()
    half = config.hidden_size // config.num_attention_heads // 2
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0] * half,
        "long_factor": [2.0] * half,
        "original_max_position_embeddings": 64,
    }
    config.original_max_position_embeddings = 64
    torch.manual_seed(0)
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    assert start(tmp_path).max_model_len == 64


def test_settings_that_cannot_be_met(model: Path) -> None:
    assert "dtype int8" in refusal(model, dtype="int8")
    assert "one sequence of 16 tokens" in refusal(model, num_blocks=None, kv_memory=1000)
    if not torch.cuda.is_available():
        assert "cuda" in refusal(model, device="cuda")


def test_end_ids_come_from_the_generation_settings_before_the_configuration(model: Path) -> None:
    (model / "generation_config.json").unlink()
    assert start(model).eos_token_ids == (2,)
    edit_json(model / "generation_config.json", eos_token_id=[5, 6])
    assert start(model).eos_token_ids == (5, 6)


def test_equal_directories_have_one_root_and_every_part_of_it_counts(original: Path, model: Path) -> None:
    root = start(original).root
    assert start(model).root == root
    assert start(model, block_size=32).root == root
    assert start(model, dtype="bfloat16").root != root
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with_tokenizer = start(model).root
    weights = load_file(model / "model.safetensors")["model.norm.weight"]
    change_weights(model, **{"model.norm.weight": weights + 1})
    with_weights = start(model).root
    edit_json(model / "config.json", rms_norm_eps=1e-3)
    assert len({root, with_tokenizer, with_weights, start(model).root}) == 4


@pytest.mark.parametrize("where", [0, 200 * 500, -1], ids=["begin", "middle", "end"])
def test_two_trainings_that_differ_in_one_small_tensor_beside_a_large_one_have_two_roots(
    tmp_path: Path, where: int
) -> None:
    (tmp_path / "config.json").write_text("{}")
    small = torch.zeros((400, 500), dtype=torch.bfloat16)
    tensors = {"a.embed.weight": torch.zeros(8 << 20), "b.v_proj.weight": small, "c.head.weight": torch.zeros(8 << 20)}
    save_file(tensors, tmp_path / "model.safetensors")
    one = checkpoint.find(str(tmp_path)).identity("")
    small.view(-1)[where] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert checkpoint.find(str(tmp_path)).identity("") != one
