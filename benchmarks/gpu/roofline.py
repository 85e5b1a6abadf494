"""The least time that a model's work can take on a device with two measured ceilings (engine.md section 7.3).

A step takes at least as long as reading what it must read, and at least as long as computing what it must compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.timing import Ceilings


@dataclass(frozen=True)
class Arithmetic:
    """What one model costs. Parameters are those a step reads: all layers and the head, not the input embedding."""

    num_parameters: int
    attention_width: int
    """layers x heads x head_dim: a token computes 4 x that x context FLOPs in attention."""
    kv_bytes_per_token: int
    bytes_per_parameter: int = 2

    @classmethod
    def of(cls, config: dict[str, int]) -> Arithmetic:
        """`config`: the sizes in a Llama- or Qwen3-like config.json."""
        hidden, layers, width = (
            config["hidden_size"],
            config["num_hidden_layers"],
            config["head_dim"],
        )
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        per_layer = hidden * (heads + 2 * kv_heads) * width + heads * width * hidden
        per_layer += 3 * hidden * config["intermediate_size"]
        return cls(
            layers * per_layer + config["vocab_size"] * hidden,
            layers * heads * width,
            2 * layers * kv_heads * width * 2,
        )

    def decode_s(self, contexts: Sequence[int], ceilings: Ceilings) -> float:
        """One token for each of these sequences."""
        num_bytes = self.num_parameters * self.bytes_per_parameter
        num_bytes += sum(contexts) * self.kv_bytes_per_token
        flops = 2 * self.num_parameters * len(contexts) + 4 * self.attention_width * sum(contexts)
        return max(num_bytes / ceilings.copy_bytes_per_s, flops / ceilings.matmul_flops_per_s)

    def prefill_s(self, num_tokens: int, ceilings: Ceilings) -> float:
        """Of one prompt; causal attention computes half of the square."""
        flops = 2 * self.num_parameters * num_tokens + 2 * self.attention_width * num_tokens**2
        return flops / ceilings.matmul_flops_per_s

    def workload_s(
        self, prompts: Sequence[int], outputs: Sequence[int], ceilings: Ceilings
    ) -> float:
        """All at once: every prompt is computed, then each step gives a token to every sequence that is not done."""
        total = sum(self.prefill_s(length, ceilings) for length in prompts)
        for done in range(1, max(outputs)):  # the first token comes with the prefill
            running = [p + done for p, o in zip(prompts, outputs, strict=True) if o > done]
            total += self.decode_s(running, ceilings)
        return total
