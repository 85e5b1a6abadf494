"""Costs of a model and what fits: parameters, bytes, FLOPs, blocks, the least time of a step (engine.md section 7.3).

The module is pure arithmetic on the standard library. It does not know where a model's sizes come from
(`model/census.py`), what a device is called (`devices.py`), nor how a plan is printed. The worker sizes itself by the
same functions.

Times are those of the roofline (Williams, Waterman, Patterson 2009): a step takes at least as long as reading what it
must read, and at least as long as computing what it must compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workers.engine.values.errors import ModelError

Format = Literal["none", "int8", "int4", "fp8", "w8a8", "llm_int8"]

INT4_GROUPS = (128, 64, 32)
"""Numbers of inputs that may share a scale. The largest that divides a layer's inputs is used."""
SCALE_BYTES = 4
GIB = 1 << 30
GRAPH_BYTES = 4 << 20
"""Allowance for the memory of one recorded step in addition to the memory that all sizes share. The log of the recording shows
the real number."""
_FULL_SEQUENCES = 256
"""Largest number of sequences of full length that are planned for. Otherwise a tiny model would take gigabytes."""
_PIN_SHARE = 5
"""A 1 / `_PIN_SHARE` part of the pool may be pinned. One sequence can have the rest."""
WATERMARK_SHARE = 100
"""A 1 / `WATERMARK_SHARE` part of the pool's blocks stays free when a sequence is admitted, and at least one block per
running sequence."""
_CPU_SHARE, _CPU_LIMIT = 0.10, 2 << 30
"""Part of the free memory that a CPU worker takes for KV, and its limit in bytes. The machine's other programs use the
rest."""

CPU_LIBRARIES = 570 << 20
"""Bytes that a worker's process takes on a CPU in addition to weights and KV: Python, torch, transformers, compiled kernels, and
what a step works in. Measured with models of 96M and 0.6B parameters."""

CPU_TERMS = (
    f"by itself a worker on a CPU takes {_CPU_SHARE:.0%} of the free memory for KV, at most {_CPU_LIMIT >> 30} GiB; "
    "HEADGATE_ENGINE_KV_MEMORY sets another size"
)
GIVEN_TERMS = "KV memory is what HEADGATE_ENGINE_KV_MEMORY says"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Largest rates of a device."""

    copy_bytes_per_s: float
    """Bytes per second read and written by a device copy."""
    matmul_flops_per_s: float
    """FLOP/s of square products in the dtype of the model."""
    linear_flops_per_s: float = 0.0
    """FLOP/s of quantized linear layers, where their products are 8-bit. With 0 they run like all others."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of parameters by what a step does with them, of a whole model or of one rank's part."""

    linears: tuple[tuple[int, int, int], ...]
    """Linear layers except the head, as (outputs, inputs, number of such layers). Their weights can be quantized."""
    head: int
    embedding: int
    """Embedding tables, of which a step reads some rows. The number is 0 where the head is the only table."""
    matrices: int
    """Other weights that every token is multiplied by."""
    vectors: int
    """Norms and biases."""
    experts: int
    """All experts of all layers."""
    expert_share: float
    """Share of a layer's experts that a token is sent to."""
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Number of tokens back that each layer attends to. 0 means back to the first token."""
    is_tied: bool = False
    """Whether the head is the input embedding."""
    stacked: tuple[tuple[int, int, int], ...] = ()
    """Matrices of experts that can be rounded, in the form of `linears`. They are counted in `experts`."""

    @classmethod
    def dense(cls, config: Mapping[str, int]) -> ModelSize:
        """Returns the sizes of a Llama, Mistral, Qwen2 or Qwen3 by the closed formula, from the sizes in its
        config.json. Norms and biases are left out."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        width = config.get("head_dim") or hidden // heads
        inner, table = config["intermediate_size"], config["vocab_size"] * hidden
        tied = bool(config.get("tie_word_embeddings"))
        return cls(
            linears=(
                ((heads + 2 * kv_heads) * width, hidden, layers),
                (hidden, heads * width, layers),
                (2 * inner, hidden, layers),
                (hidden, inner, layers),
            ),
            head=table,
            embedding=0 if tied else table,
            matrices=0,
            vectors=0,
            experts=0,
            expert_share=0.0,
            vocab=config["vocab_size"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width,
            windows=(0,) * layers,
            is_tied=tied,
        )

    @property
    def num_linear(self) -> int:
        return sum(outputs * inputs * number for outputs, inputs, number in self.linears)

    @property
    def total(self) -> int:
        every_step = self.num_linear + self.head + self.matrices + self.vectors
        return every_step + self.embedding + self.experts

    @property
    def active(self) -> int:
        """Number of parameters that a token uses: without embedding tables, and only the experts that it is sent to."""
        others = self.total - self.embedding - self.experts
        return others + round(self.experts * self.expert_share)

    @property
    def widest(self) -> int:
        """Number of outputs of the largest linear layer."""
        return max((outputs for outputs, _, _ in self.linears), default=0)

    def layer_flops(self) -> tuple[float, float]:
        """Returns the FLOPs per token of the linear layers, and of the layers' other products. Attention is not
        counted."""
        others = self.matrices + self.experts * self.expert_share
        return 2.0 * self.num_linear, 2.0 * others

    def attended(self, context: int) -> int:
        """Returns the number of keys that one token reads, summed over the layers. `context` includes the token
        itself."""
        return sum(min(context, window or context) for window in self.windows)

    def attended_by_prompt(self, num_tokens: int) -> int:
        """Returns the number of keys read by all tokens of a prompt: each attends to those before it and to itself."""
        total = 0
        for window in self.windows:
            growing = min(num_tokens, window or num_tokens)
            total += growing * (growing + 1) // 2 + (num_tokens - growing) * growing
        return total

    @property
    def flops_per_attended(self) -> int:
        """FLOPs of the score and the weighted sum for one key."""
        return 4 * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Served:
    """A model in the formats in which it is served."""

    size: ModelSize
    itemsize: int = 2
    """Bytes of a number of the model's dtype."""
    quant: Format = "none"
    kv_itemsize: int = 2
    kv_scales: bool = False
    """Whether 8-bit KV has a scale per token, head, and K or V."""
    head_is_copied: bool = False
    """Whether the head is copied into another layout. Then a tied embedding takes memory in addition."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        size = self.size
        others = size.total - size.num_linear - size.experts
        if self.head_is_copied and size.is_tied:
            others += size.head
        return self._linear_bytes + self._expert_bytes + others * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        per_head = kv_head_bytes(self.size.head_dim, self.kv_itemsize, self.kv_scales)
        return 2 * len(self.size.windows) * self.size.num_kv_heads * per_head

    def flops_per_token(self, context: int) -> float:
        linear, others = self.size.layer_flops()
        attention = self.size.flops_per_attended * self.size.attended(context)
        return linear + others + 2.0 * self.size.head + attention

    def read_bytes(self, num_tokens: int) -> float:
        """Returns the bytes of weights that a step of `num_tokens` tokens reads. Of the experts it counts those that
        are used if every token chooses its own at random."""
        size = self.size
        always = size.head + size.matrices + size.vectors
        touched = self._expert_bytes * (1.0 - (1.0 - size.expert_share) ** num_tokens)
        return self._linear_bytes + touched + always * self.itemsize

    def decode_sides(self, contexts: Sequence[int], ceilings: Ceilings) -> tuple[float, float]:
        """Returns the seconds to read and the seconds to compute in a step that gives one token to each of these
        sequences."""
        size, number = self.size, len(contexts)
        attended = sum(map(size.attended, contexts))
        num_bytes = self.read_bytes(number) + attended * self._kv_bytes_per_layer
        compute = self._compute_s(number, number, attended, ceilings)
        return num_bytes / ceilings.copy_bytes_per_s, compute

    def decode_s(self, contexts: Sequence[int], ceilings: Ceilings) -> float:
        return max(self.decode_sides(contexts, ceilings))

    def prefill_sides(self, num_tokens: int, ceilings: Ceilings) -> tuple[float, float]:
        """Returns the seconds to read and to compute one prompt in one step, to its first token. Only the last token
        reaches the head."""
        num_bytes = self.read_bytes(num_tokens) + num_tokens * self.kv_bytes_per_token
        attended = self.size.attended_by_prompt(num_tokens)
        compute = self._compute_s(num_tokens, 1, attended, ceilings)
        return num_bytes / ceilings.copy_bytes_per_s, compute

    def prefill_s(self, num_tokens: int, ceilings: Ceilings) -> float:
        return max(self.prefill_sides(num_tokens, ceilings))

    def knee(self, ceilings: Ceilings) -> float:
        """Returns the number of tokens of a step at which computing takes as long as reading all weights. Attention is
        left out."""
        per_token = self._compute_s(1, 1, 0, ceilings)
        return self.read_bytes(1 << 20) / ceilings.copy_bytes_per_s / per_token

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Returns an estimate of the memory that the largest step holds at a time: hidden states, the widest product
        and its halves, and float32 logits three times over. A worker on a GPU measures it."""
        size = self.size
        hidden = size.head // max(1, size.vocab)
        return num_tokens * (6 * hidden + 2 * size.widest) * self.itemsize + num_rows * size.vocab * 12

    @property
    def _kv_bytes_per_layer(self) -> float:
        return self.kv_bytes_per_token / len(self.size.windows)

    @property
    def _linear_bytes(self) -> int:
        return sum(
            number * linear_bytes(outputs, inputs, self.quant, self.itemsize)
            for outputs, inputs, number in self.size.linears
        )

    @property
    def _expert_bytes(self) -> int:
        """Bytes of the experts. Formats that round activations leave experts as they are."""
        quant = self.quant if self.quant in ("int8", "int4") else "none"
        stacked, rest = 0, self.size.experts
        for outputs, inputs, number in self.size.stacked:
            stacked += number * linear_bytes(outputs, inputs, quant, self.itemsize)
            rest -= number * outputs * inputs
        return stacked + rest * self.itemsize

    def _compute_s(self, num_tokens: int, num_drawn: int, attended: int, ceilings: Ceilings) -> float:
        linear, others = self.size.layer_flops()
        plain = others * num_tokens + 2.0 * self.size.head * num_drawn
        plain += self.size.flops_per_attended * attended
        rate = ceilings.matmul_flops_per_s
        return linear * num_tokens / (ceilings.linear_flops_per_s or rate) + plain / rate


def linear_bytes(outputs: int, inputs: int, quant: Format, itemsize: int) -> int:
    """Returns the bytes of a linear weight with its scales. Raises ModelError where int4 cannot divide the inputs into
    groups."""
    if quant == "none":
        return outputs * inputs * itemsize
    if quant != "int4":
        return outputs * (inputs + SCALE_BYTES)
    group = next((group for group in INT4_GROUPS if inputs % group == 0), None)
    if group is None:
        raise ModelError(
            f"int4 needs layers whose inputs can be cut into groups of {INT4_GROUPS[-1]}, but one has {inputs}."
        )
    return outputs * (inputs // 2 + inputs // group * itemsize)


def kv_head_bytes(head_dim: int, itemsize: int, scales: bool) -> int:
    """Returns the bytes of one key or value of one token and head."""
    return head_dim * itemsize + (SCALE_BYTES if scales else 0)


# --- memory ---


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The parts of a device's memory, in bytes."""

    total: int
    share: float
    """Share of the total that the worker takes for everything."""
    used: int
    """Weights, device rows, static buffers, libraries, and what other processes hold."""
    activations: int
    """Peak of the largest step."""
    graphs: int
    """Estimate for recorded steps."""

    @property
    def kv(self) -> int:
        return int(self.total * self.share) - self.used - self.activations - self.graphs

    def terms(self) -> str:
        return (
            f"{self.share:.0%} of {self.total / GIB:.2f} GiB"
            f" - {self.used / GIB:.2f} used"
            f" - {self.activations / GIB:.2f} for a step"
            f" - {self.graphs / GIB:.2f} for recorded steps"
            f" = {self.kv / GIB:.2f} GiB"
        )


def most_blocks(max_model_len: int, block_size: int) -> int:
    """Returns the largest number of blocks that a worker takes by itself, including the null block."""
    return 1 + _FULL_SEQUENCES * -(-max_model_len // block_size)


def pin_limit(num_blocks: int) -> int:
    return num_blocks // _PIN_SHARE


def longest_sequence(num_blocks: int, block_size: int) -> int:
    """Returns the number of tokens of the longest sequence that fits with the largest number of pinned blocks."""
    return max(0, num_blocks - 1 - pin_limit(num_blocks)) * block_size


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns the size of the smallest pool in which one sequence of `num_tokens` tokens can always run."""
    number = 1 + -(-num_tokens // block_size)
    while longest_sequence(number, block_size) < num_tokens:
        number += -(-(num_tokens - longest_sequence(number, block_size)) // block_size)
    return number


def cpu_kv_bytes(available: int, num_ranks: int) -> int:
    """Returns the bytes that each rank of a CPU worker takes for KV by itself, from the memory that is free without its
    weights."""
    return min(int(max(0, available) * _CPU_SHARE), _CPU_LIMIT) // num_ranks


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one rank must have to be of use, in bytes and tokens."""

    weights: int
    bytes_per_block: int
    block_size: int
    num_tokens: int
    """Length of the shortest sequence that must fit."""

    def num_blocks(self, kv: int, most: int, terms: str = "") -> int:
        """Returns the number of blocks in `kv` bytes, including the null block. Raises ModelError, with the numbers, if
        the sequence does not fit. `terms` says where the bytes come from."""
        least = blocks_for(self.num_tokens, self.block_size)
        number = min(kv // self.bytes_per_block, most)
        if number < least:
            raise does_not_fit(self.weights, self.weights + kv, least * self.bytes_per_block, self.num_tokens, terms)
        return number


def does_not_fit(weights: int, has: int, sequence: int = 0, num_tokens: int = 0, terms: str = "") -> ModelError:
    """Returns the error with its one sentence. All sizes are in bytes; without a sequence the weights alone are too
    large."""
    kv = (
        f" and {in_words(sequence)} for one sequence of {num_tokens} tokens and the pinned blocks" if num_tokens else ""
    )
    because = f" ({terms})" if terms else ""
    return ModelError(
        f"The model does not fit: it needs {in_words(weights)} for weights{kv}, and has {in_words(has)}{because}."
    )


def in_words(num_bytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size / 10 or unit == "KiB":
            return f"{num_bytes / size:.2f} {unit}"
    raise AssertionError
