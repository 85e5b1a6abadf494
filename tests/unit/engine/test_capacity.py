"""The arithmetic of `headgate plan`, against the design's table and against figures worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.engine.sizing import capacity
from workers.engine.sizing.capacity import Ceilings, ModelSize, Need, Served
from workers.engine.values.errors import ModelError

H200 = Ceilings(4.3e12, 790e12)
ROOT = Path(__file__).resolve().parents[3]


def dense(hidden, inner, layers, heads, kv_heads, vocab, tied=False):
    return Served(
        ModelSize.dense(
            {
                "hidden_size": hidden,
                "intermediate_size": inner,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": 128,
                "vocab_size": vocab,
                "tie_word_embeddings": tied,
            }
        )
    )


MODELS = {
    "Qwen3-0.6B": dense(1024, 3072, 28, 16, 8, 151_936, tied=True),
    "Qwen2.5-1.5B": dense(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "Llama-3.1-8B": dense(4096, 14_336, 32, 32, 8, 128_256),
    "Qwen3-14B": dense(5120, 17_408, 40, 40, 8, 151_936),
}


@pytest.mark.parametrize(
    ("name", "kv_bytes", "floor_ms", "tokens_per_s"),
    [
        ("Qwen3-0.6B", 114_688, 0.277, 3607),
        ("Qwen2.5-1.5B", 28_672, 0.718, 1393),
        ("Llama-3.1-8B", 131_072, 3.49, 286),
        ("Qwen3-14B", 163_840, 6.51, 154),
    ],
)
def test_the_floors_on_an_h200_are_those_of_the_design(name, kv_bytes, floor_ms, tokens_per_s):
    served = MODELS[name]
    floor = served.decode_s([0], H200)
    assert served.kv_bytes_per_token == kv_bytes
    assert floor * 1000 == pytest.approx(floor_ms, rel=3e-3)
    assert 1 / floor == pytest.approx(tokens_per_s, rel=3e-3)


def test_a_tied_head_is_one_tensor_and_is_read_an_input_embedding_is_not():
    tied, apart = (dense(1024, 3072, 28, 16, 8, 151_936, tied) for tied in (True, False))
    assert apart.size.total - tied.size.total == 151_936 * 1024
    assert apart.read_bytes(1) == tied.read_bytes(1) == tied.weight_bytes
    assert apart.size.active == tied.size.active == tied.size.total


def test_the_knee_is_the_ratio_of_the_ceilings_for_16_bits():
    assert MODELS["Llama-3.1-8B"].knee(H200) == pytest.approx(790 / 4.3)


def test_a_step_is_bound_by_memory_below_the_knee_and_by_arithmetic_above():
    served = MODELS["Llama-3.1-8B"]
    for number, bound_by_memory in ((150, True), (220, False)):
        read, compute = served.decode_sides([0] * number, H200)
        assert (read > compute) is bound_by_memory


def test_a_decode_step_reads_weights_once_and_the_kv_of_each_sequence():
    served = MODELS["Qwen3-0.6B"]
    seconds = served.decode_s([100, 900], H200)
    assert seconds * 4.3e12 == pytest.approx(served.read_bytes(2) + 1000 * 114_688)


def test_only_the_last_token_of_a_prompt_reaches_the_head():
    served = MODELS["Qwen3-0.6B"]
    size = served.size
    flops = 2 * size.num_linear * 4096 + 2 * size.head + 4 * 28 * 16 * 128 * (4096 * 4097 // 2)
    assert served.prefill_s(4096, H200) == pytest.approx(flops / 790e12)


def test_flops_of_a_token_are_two_per_weight_and_four_per_attended_number():
    size = MODELS["Llama-3.1-8B"].size
    expected = 2 * (size.num_linear + size.head) + 4 * 32 * 32 * 128 * 5000
    assert MODELS["Llama-3.1-8B"].flops_per_token(5000) == expected


def sized(**changes):
    given = {
        "linears": ((8, 64, 2),),
        "head": 640,
        "embedding": 640,
        "matrices": 0,
        "vectors": 0,
        "experts": 0,
        "expert_share": 0.0,
        "vocab": 10,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "windows": (0, 0),
    }
    return ModelSize(**given | changes)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6, 40])
def test_a_window_bounds_what_is_attended(num_tokens):
    size = sized(windows=(0, 5, 5))
    assert size.attended_by_prompt(num_tokens) == sum(map(size.attended, range(1, num_tokens + 1)))
    assert size.attended(100) == 110


def test_a_step_touches_more_experts_the_more_tokens_it_has():
    size = sized(experts=8000, expert_share=0.25)
    served = Served(size)
    assert size.active == size.num_linear + size.head + 2000
    read = [served.read_bytes(number) - 2 * (size.num_linear + size.head) for number in (1, 2, 99)]
    assert read == pytest.approx([4000, 2 * 8000 * (1 - 0.75**2), 16_000])
    alone = served.flops_per_token(0)
    assert alone == 2 * size.active


def test_experts_take_the_formats_that_round_weights_alone():
    """Of 9,000 numbers 8,192 are in matrices that can be rounded."""
    size = sized(experts=9000, expert_share=0.5, stacked=((32, 64, 4),))
    others = Served(sized()).weight_bytes
    linear = Served(sized(), quant="int8").weight_bytes
    assert Served(size).weight_bytes - others == 2 * 9000
    assert Served(size, quant="int8").weight_bytes - linear == 8192 + 4 * 32 * 4 + 2 * 808
    assert Served(size, quant="fp8").weight_bytes == linear + 2 * 9000
    read = [Served(s, quant="int8").read_bytes(1) for s in (size, sized())]
    assert read[0] - read[1] == (8192 + 4 * 32 * 4 + 2 * 808) / 2


@pytest.mark.parametrize(
    ("quant", "expected"), [("none", 128 * 64 * 2), ("int8", 128 * 64 + 128 * 4), ("int4", 128 * 64 // 2 + 128 * 2)]
)
def test_linear_weights_take_their_format_and_its_scales(quant, expected):
    served = Served(sized(linears=((128, 64, 3),)), quant=quant)
    assert served.weight_bytes == 3 * expected + 2 * 1280


def test_8_bit_kv_has_scales():
    assert Served(sized(), kv_itemsize=1, kv_scales=True).kv_bytes_per_token == 2 * 2 * 2 * (16 + 4)


def test_int4_needs_groups():
    with pytest.raises(ModelError, match="but one has 48"):
        _ = Served(sized(linears=((8, 48, 1),)), quant="int4").weight_bytes


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_smallest_pool_for_a_sequence_is_the_smallest(block_size):
    for num_tokens in (1, 15, 16, 17, 100, 1000, 4099):
        number = capacity.blocks_for(num_tokens, block_size)
        assert capacity.longest_sequence(number, block_size) >= num_tokens
        assert capacity.longest_sequence(number - 1, block_size) < num_tokens


def test_a_sequence_that_just_fits_is_served_and_one_byte_less_is_refused_with_the_numbers():
    need = Need(weights=3 << 30, bytes_per_block=1 << 20, block_size=16, num_tokens=1600)
    least = capacity.blocks_for(1600, 16)
    assert need.num_blocks(least << 20, 10**9) == least
    with pytest.raises(ModelError) as refused:
        need.num_blocks((least << 20) - 1, 10**9, "why")
    assert str(refused.value) == (
        "The model does not fit: it needs 3.00 GiB for weights and 0.12 GiB for one sequence of 1600 tokens and the "
        "pinned blocks, and has 3.12 GiB (why)."
    )


def test_the_arithmetic_needs_the_standard_library_only():
    code = (
        "import sys, workers.engine.sizing.capacity, workers.engine.sizing.devices, benchmarks.gpu.roofline\n"
        "print([m for m in ('torch', 'msgspec', 'pydantic', 'click', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
