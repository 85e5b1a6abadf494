"""What a model costs and what fits: parameters, bytes, FLOPs, blocks, the least time of a step (engine.md section 7.3).

Pure arithmetic on the standard library. Does not know where a model's sizes come from (`model/census.py`), what a
device is called (`devices.py`), nor how a plan is printed. The worker sizes itself by the same functions.

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
"""Inputs that share a scale, the largest that divides a layer's inputs."""
SCALE_BYTES = 4
GIB = 1 << 30
GRAPH_BYTES = 4 << 20
"""Allowance for what a recorded step of one size holds beside the memory all sizes share. The log of the recording
tells what it really was."""
_FULL_SEQUENCES = 256
"""More sequences of full length than this are never resident: a tiny model must not take gigabytes."""
_PIN_SHARE = 5
"""A fifth of the pool may be pinned; what one sequence can need is the rest of it."""
WATERMARK_SHARE = 100
"""One block in so many of the pool stays free when a sequence is admitted, and at least one per running sequence."""
_CPU_SHARE, _CPU_LIMIT = 0.10, 2 << 30
"""A CPU worker shares its memory with everything else on the machine."""

CPU_TERMS = (
    f"by itself a worker on a CPU takes {_CPU_SHARE:.0%} of the free memory for KV, at most {_CPU_LIMIT >> 30} GiB; "
    "HEADGATE_ENGINE_KV_MEMORY sets another size"
)
GIVEN_TERMS = "KV memory is what HEADGATE_ENGINE_KV_MEMORY says"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device can do at most."""

    copy_bytes_per_s: float
    """Bytes read and written by a device copy."""
    matmul_flops_per_s: float
    """In the dtype of the model; square."""
    linear_flops_per_s: float = 0.0
    """Of quantized linear layers, where their products are 8-bit; 0: as all others."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of parameters by what a step does with them, of a whole model or of one rank's part."""

    linears: tuple[tuple[int, int, int], ...]
    """Linear layers but the head: outputs, inputs, how many of them. The weights that can be quantized."""
    head: int
    embedding: int
    """Tables of which a step reads some rows. 0 where the head is the only one."""
    matrices: int
    """Other weights that every token is multiplied by."""
    vectors: int
    """Norms and biases."""
    experts: int
    """All experts of all layers."""
    expert_share: float
    """Experts that a token is sent to, of all of a layer."""
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """For each layer how many tokens back it attends; 0: to the first."""
    is_tied: bool = False
    """The head is the input embedding."""
    stacked: tuple[tuple[int, int, int], ...] = ()
    """Matrices of experts that can be rounded, as `linears`; counted in `experts`."""

    @classmethod
    def dense(cls, config: Mapping[str, int]) -> ModelSize:
        """The closed formula: a Llama, Mistral, Qwen2 or Qwen3 from the sizes in its config.json, without norms and
        biases."""
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
        """What a token meets: without embedding tables, and of the experts those it is sent to."""
        others = self.total - self.embedding - self.experts
        return others + round(self.experts * self.expert_share)

    @property
    def widest(self) -> int:
        """Outputs of the largest linear layer."""
        return max((outputs for outputs, _, _ in self.linears), default=0)

    def layer_flops(self) -> tuple[float, float]:
        """Per token, of the linear layers and of the layers' other products, attention not counted."""
        others = self.matrices + self.experts * self.expert_share
        return 2.0 * self.num_linear, 2.0 * others

    def attended(self, context: int) -> int:
        """Keys that one token reads, summed over the layers, itself included in `context`."""
        return sum(min(context, window or context) for window in self.windows)

    def attended_by_prompt(self, num_tokens: int) -> int:
        """The same for all tokens of a prompt: each attends to those before it and to itself."""
        total = 0
        for window in self.windows:
            growing = min(num_tokens, window or num_tokens)
            total += growing * (growing + 1) // 2 + (num_tokens - growing) * growing
        return total

    @property
    def flops_per_attended(self) -> int:
        """Score and weighted sum."""
        return 4 * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Served:
    """A model in the formats it is served in."""

    size: ModelSize
    itemsize: int = 2
    """Bytes of a number of the model's dtype."""
    quant: Format = "none"
    kv_itemsize: int = 2
    kv_scales: bool = False
    """8-bit KV has a scale per token, head, and K or V."""
    head_is_copied: bool = False
    """Into another layout: a tied embedding stays beside it."""

    @property
    def weight_bytes(self) -> int:
        """In memory."""
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
        """Weights that a step of so many tokens reads. Of the experts those that it touches if every token chooses
        its own at random."""
        size = self.size
        always = size.head + size.matrices + size.vectors
        touched = self._expert_bytes * (1.0 - (1.0 - size.expert_share) ** num_tokens)
        return self._linear_bytes + touched + always * self.itemsize

    def decode_sides(self, contexts: Sequence[int], ceilings: Ceilings) -> tuple[float, float]:
        """Seconds to read and seconds to compute a step that gives one token to each of these sequences."""
        size, number = self.size, len(contexts)
        attended = sum(map(size.attended, contexts))
        num_bytes = self.read_bytes(number) + attended * self._kv_bytes_per_layer
        compute = self._compute_s(number, number, attended, ceilings)
        return num_bytes / ceilings.copy_bytes_per_s, compute

    def decode_s(self, contexts: Sequence[int], ceilings: Ceilings) -> float:
        return max(self.decode_sides(contexts, ceilings))

    def prefill_sides(self, num_tokens: int, ceilings: Ceilings) -> tuple[float, float]:
        """Of one prompt in one step, to its first token. Only the last token reaches the head."""
        num_bytes = self.read_bytes(num_tokens) + num_tokens * self.kv_bytes_per_token
        attended = self.size.attended_by_prompt(num_tokens)
        compute = self._compute_s(num_tokens, 1, attended, ceilings)
        return num_bytes / ceilings.copy_bytes_per_s, compute

    def prefill_s(self, num_tokens: int, ceilings: Ceilings) -> float:
        return max(self.prefill_sides(num_tokens, ceilings))

    def knee(self, ceilings: Ceilings) -> float:
        """Tokens of a step, attention aside, at which computing takes as long as reading all weights."""
        per_token = self._compute_s(1, 1, 0, ceilings)
        return self.read_bytes(1 << 20) / ceilings.copy_bytes_per_s / per_token

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """An estimate of what the largest step holds at a time: hidden states, the widest product and its halves, and
        float32 logits three times over. A worker on a GPU measures it."""
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
        """Formats that round activations leave experts as they are."""
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
    """A linear weight with its scales. Raises ModelError where int4 cannot cut the inputs into groups."""
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
    """Of one key or value of one token and head."""
    return head_dim * itemsize + (SCALE_BYTES if scales else 0)


# --- memory ---


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All in bytes."""

    total: int
    share: float
    """Of the total, for everything."""
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
    """What a worker takes at most by itself, the null block included."""
    return 1 + _FULL_SEQUENCES * -(-max_model_len // block_size)


def pin_limit(num_blocks: int) -> int:
    return num_blocks // _PIN_SHARE


def longest_sequence(num_blocks: int, block_size: int) -> int:
    """Tokens, beside as many pinned blocks as there may be."""
    return max(0, num_blocks - 1 - pin_limit(num_blocks)) * block_size


def blocks_for(num_tokens: int, block_size: int) -> int:
    """The smallest pool in which one sequence of so many tokens can always run."""
    number = 1 + -(-num_tokens // block_size)
    while longest_sequence(number, block_size) < num_tokens:
        number += -(-(num_tokens - longest_sequence(number, block_size)) // block_size)
    return number


def cpu_kv_bytes(available: int, num_ranks: int) -> int:
    """What each rank of a CPU worker takes for KV by itself, of what is free beside its weights."""
    return min(int(max(0, available) * _CPU_SHARE), _CPU_LIMIT) // num_ranks


@dataclass(frozen=True, slots=True)
class Need:
    """What one rank must hold to be of use, in bytes and tokens."""

    weights: int
    bytes_per_block: int
    block_size: int
    num_tokens: int
    """Of the shortest sequence that must fit."""

    def num_blocks(self, kv: int, most: int, terms: str = "") -> int:
        """Blocks in `kv` bytes, the null block included. ModelError, with the numbers, if the sequence does not fit;
        `terms`: where the bytes come from."""
        least = blocks_for(self.num_tokens, self.block_size)
        number = min(kv // self.bytes_per_block, most)
        if number < least:
            raise does_not_fit(self.weights, self.weights + kv, least * self.bytes_per_block, self.num_tokens, terms)
        return number


def does_not_fit(weights: int, has: int, sequence: int = 0, num_tokens: int = 0, terms: str = "") -> ModelError:
    """The one sentence. All in bytes; without a sequence the weights alone are too large."""
    kv = f" and {in_words(sequence)} for one sequence of {num_tokens} tokens beside pinned blocks" if num_tokens else ""
    because = f" ({terms})" if terms else ""
    return ModelError(
        f"The model does not fit: it needs {in_words(weights)} for weights{kv}, and has {in_words(has)}{because}."
    )


def in_words(num_bytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size / 10 or unit == "KiB":
            return f"{num_bytes / size:.2f} {unit}"
    raise AssertionError
