"""The two architectures, and the export of a trained model to a folder that loads anywhere.

The module knows the shapes and the file formats; it knows nothing of the training.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypedDict

import tokenizer as demo_tokenizer
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


class Shape(TypedDict):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


SHAPES: dict[str, Shape] = {
    "model": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
# The order of tokenizer.SPECIAL, which take the first ids.
PAD_ID, BOS_ID, EOS_ID, IM_END_ID = 0, 1, 2, 4


def config(name: str) -> LlamaConfig:
    return LlamaConfig(
        **SHAPES[name],
        vocab_size=demo_tokenizer.VOCABULARY,
        head_dim=64,
        max_position_embeddings=demo_tokenizer.MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, IM_END_ID],
        pad_token_id=PAD_ID,
    )


def save(model: LlamaForCausalLM, tok: Tokenizer, folder: Path) -> None:
    """Writes weights in bf16, configuration, tokenizer and chat template."""
    shipped = copy.deepcopy(model)
    shipped.to(torch.bfloat16).eval()  # type: ignore[arg-type]  # the decorator of transformers' `to` hides self from mypy
    shipped.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[EOS_ID, IM_END_ID], pad_token_id=PAD_ID
    )
    shipped.save_pretrained(folder)
    demo_tokenizer.save(tok, folder)
