"""Tiny random-weight models of real architectures, written once per test session as Hugging Face directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from workers.engine.runner import ModelRunner, RunnerSettings

_COMMON = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide enough that the best two tokens are never near each other and attention is never flat.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_WINDOW = 12

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON, head_dim=64),
    "llama-tied-biased": lambda: transformers.LlamaConfig(
        **_COMMON | {"tie_word_embeddings": True},
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=32),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, head_dim=32, sliding_window=_WINDOW),
    "phi3": lambda: transformers.Phi3Config(**_COMMON),
    "gemma2": lambda: transformers.Gemma2Config(
        **_COMMON,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=_WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_COMMON,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=_WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON, head_dim=32, sliding_window=_WINDOW, num_local_experts=2, num_experts_per_tok=1
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=301,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    ),
    "cohere": lambda: transformers.CohereConfig(**_COMMON, logit_scale=0.0625),
    "granite": lambda: transformers.GraniteConfig(
        **_COMMON, logits_scaling=3.0, residual_multiplier=0.5, embedding_multiplier=2.0
    ),
}


@dataclass(frozen=True)
class TinyModel:
    directory: Path
    reference: PreTrainedModel
    """transformers' own, eager, float32."""

    def runner(self, **settings: object) -> ModelRunner:
        given = {"num_blocks": 48, "block_size": 4, "device": "cpu", **settings}
        return ModelRunner(RunnerSettings(str(self.directory), **given))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            torch.manual_seed(sum(map(ord, name)))
            model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
            model = model.eval().requires_grad_(False)
            directory = tmp_path_factory.mktemp(name)
            model.save_pretrained(directory)
            made[name] = TinyModel(directory, model)
        return made[name]

    return make
