"""Models of known shapes with random weights: a configuration in a folder, and a runner over it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.sizing.capacity import ModelSize, Served


@dataclass(frozen=True)
class Shape:
    name: str
    config: dict[str, Any]

    @property
    def served(self) -> Served:
        return Served(ModelSize.dense(self.config))


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


SHAPES = (
    Shape("Qwen3-0.6B", _qwen3(1024, 3072, 28, 16, tied=True)),
    Shape(
        "Llama-8B",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128_256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
    ),
    Shape("Qwen3-14B", _qwen3(5120, 17_408, 40, 40, tied=False)),
)
TINY = Shape(
    "tiny Qwen3", _qwen3(64, 128, 2, 4, tied=True) | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 11_000}
)


def random_runner(shape: Shape, folder: Path, device: str, max_len: int, num_blocks: int | None = None) -> ModelRunner:
    """The runner of a worker; only its weights do not come from a checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config))
    return ModelRunner(
        RunnerSettings(
            str(folder),
            device=device,
            dtype="bfloat16",
            num_blocks=num_blocks,
            max_model_len=max_len,
            random_weights=True,
        )
    )
