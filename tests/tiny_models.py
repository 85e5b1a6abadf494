"""Tiny random-weight models of real architectures, and rows made by hand to drive a runner with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.values.plan import Row, SampledToken, SampleSpec
from workers.protocol.messages import SamplingParams

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
    "gemma": lambda: transformers.GemmaConfig(**_COMMON, head_dim=32, hidden_act="gelu_pytorch_tanh"),
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
    "mixtral": lambda: transformers.MixtralConfig(**_COMMON, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(  # one layer without experts
        **_COMMON,
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "hunyuan_moe": lambda: transformers.HunYuanMoEV1Config(**_COMMON, head_dim=32, num_experts=4, moe_topk=2),
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
    # Checkpoints whose names transformers maps to those of its model.
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **{name: value for name, value in _COMMON.items() if name != "num_key_value_heads"}
    ),
    "phi": lambda: transformers.PhiConfig(**_COMMON, partial_rotary_factor=0.5),
    "starcoder2": lambda: transformers.Starcoder2Config(**_COMMON, sliding_window=_WINDOW),
    "phimoe": lambda: transformers.PhimoeConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **_COMMON, num_local_experts=4, num_experts_per_tok=2, logits_scaling=3.0
    ),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **_COMMON, moe_num_experts=4, moe_k=2, moe_intermediate_size=48
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

    @classmethod
    def make(cls, name: str, directory: Path, **changes: object) -> TinyModel:
        """`changes`: of the configuration."""
        torch.manual_seed(sum(map(ord, name)))
        config = CONFIGS[name]()
        config.update(changes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.eval().requires_grad_(False)
        model.save_pretrained(directory)
        return cls(directory, model)

    def runner(self, **settings: object) -> ModelRunner:
        given = {"num_blocks": 48, "block_size": 4, "device": "cpu", **settings}
        return ModelRunner(RunnerSettings(str(self.directory), **given))


def best_tokens(reference: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """transformers' best token at each place of an output, after the tokens before it, and never the end. Where all of
    them are the output's own, `generate` gives the same output, with a pass for each token."""
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        logits[:, reference.config.eos_token_id] = float("-inf")
        return logits.argmax(-1).tolist()


GREEDY = SamplingParams(seed=0, temperature=0.0, min_tokens=1000)
"""`min_tokens` forbids the end token, so that outputs have the length a test wants."""


@dataclass
class Driven:
    prompt: list[int]
    params: SamplingParams = GREEDY
    arrival: int = 0
    """First step that may run it."""
    output: list[int] = field(default_factory=list)
    drawn: list[SampledToken] = field(default_factory=list)
    num_written: int = 0
    table: list[int] = field(default_factory=list)

    def row(self, chunk: int) -> Row:
        tokens = [*self.prompt, *self.output]
        end = min(len(tokens), self.num_written + chunk)
        draws = ()
        if end == len(tokens):
            draws = (SampleSpec(self.params, self.params.seed, end, self.prompt, self.output),)
        return Row(tokens[self.num_written : end], self.num_written, self.table, draws)


def place(runner: ModelRunner, sequences: Sequence[Driven], num_tokens: int, shuffle_seed: int = 0) -> None:
    """Gives each sequence blocks for `num_tokens` output tokens, in random order. KV starts poisoned: a slot read
    before it was written shows in every later token."""
    with torch.inference_mode():
        poisoned = runner.store.tensor if runner.store.scales is None else runner.store.scales
        poisoned.fill_(float("nan"))
    free = list(range(1, runner.num_blocks))
    random.Random(shuffle_seed).shuffle(free)
    for sequence in sequences:
        needed = -(-(len(sequence.prompt) + num_tokens) // runner.block_size)
        sequence.table, free = free[:needed], free[needed:]
        assert len(sequence.table) == needed, "the test's pool is too small"


def step(runner: ModelRunner, running: Sequence[Driven], chunk: int = 1 << 30) -> None:
    rows = [sequence.row(chunk) for sequence in running]
    for sequence, row, result in zip(running, rows, runner.execute(rows), strict=True):
        sequence.num_written += len(row.tokens)
        sequence.drawn += result.drawn
        sequence.output += [drawn.token for drawn in result.drawn]


def drive(
    runner: ModelRunner, sequences: Sequence[Driven], num_tokens: int, chunk: int = 1 << 30, shuffle_seed: int = 0
) -> None:
    """Runs every sequence to `num_tokens` output tokens."""
    place(runner, sequences, num_tokens, shuffle_seed)
    number = 0
    while waiting := [s for s in sequences if len(s.output) < num_tokens]:
        if running := [s for s in waiting if s.arrival <= number]:
            step(runner, running, chunk)
        number += 1
