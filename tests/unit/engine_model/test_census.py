"""Parameters counted on meta, against transformers' own models and a runner's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import _COMMON, CONFIGS, TinyModel
from transformers import AutoModelForCausalLM

from workers.engine.device.graphs import bucket_sizes
from workers.engine.layers.quant import QuantLinear
from workers.engine.model import census
from workers.engine.sizing import sizing
from workers.engine.sizing.capacity import ModelSize
from workers.engine.values.errors import ModelError

MOE = {
    "mixtral": lambda: transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
ALL = {**CONFIGS, **MOE}
DENSE = ("llama", "llama-tied-biased", "qwen2", "qwen3", "mistral", "phi3", "granite", "cohere")
"""Three matrices in the MLP, four of attention."""


def take(name: str, num_ranks: int = 1, quant: str = "none", on_cpu: bool = False) -> census.Census:
    return census.take(ALL[name](), torch.bfloat16, None, quant, num_ranks, on_cpu)


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_is_counted_once(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ALL[name]())
    size = take(name).whole.size
    assert size.total == sum(parameter.numel() for parameter in model.parameters())
    assert size.embedding + size.head >= model.get_input_embeddings().weight.numel()


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_has_the_matrices_of_the_closed_formula(name):
    size, closed = take(name).whole.size, ModelSize.dense(ALL[name]().to_dict())
    assert (size.num_linear, size.head, size.embedding) == (closed.num_linear, closed.head, closed.embedding)
    assert size.matrices == size.experts == 0


@pytest.mark.parametrize(("name", "share"), [("mixtral", 1 / 2), ("qwen3_moe", 1 / 4)])
def test_a_token_meets_the_experts_it_is_sent_to(name, share):
    config, size = ALL[name](), take(name).whole.size
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    assert size.experts == 3 * config.num_local_experts * 3 * 64 * inner
    assert size.total - size.embedding - size.active == size.experts * (1 - share)


def test_experts_of_an_unknown_share_are_refused():
    config = ALL["llama"]()
    with pytest.raises(ModelError, match="how many of its experts"):
        census._expert_share(config)


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma2", "gpt2", "gpt_oss", "phi3"])
def test_the_counted_sizes_are_those_of_a_runner(name, tmp_path: Path):
    runner = TinyModel.make(name, tmp_path).runner(dtype="bfloat16")
    rank = take(name, on_cpu=True).rank
    shape = runner.store.shape
    assert rank.kv_bytes_per_token * shape.block_size == shape.bytes_per_block
    assert rank.weight_bytes == runner._weights == held_bytes(runner.loaded.model)
    assert take(name).context_limit == runner.max_model_len


def held_bytes(model: torch.nn.Module) -> int:
    """By the modules of a loaded model: parameters, packed weights, and the norms that hand-written layers keep."""
    kept = [getattr(module, name, None) or () for module in model.modules() for name in ("norms", "added_norms")]
    norms = [norm for of_layer in kept for norm in of_layer]
    tensors = {id(p): p for module in (model, *norms) for p in module.parameters()}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                tensors[id(value)] = value
    packed = {id(m.product): m.product.num_bytes for m in model.modules() if hasattr(m, "product")}
    return sum(tensor.nbytes for tensor in tensors.values()) + sum(packed.values())


@pytest.mark.parametrize("quant", ["none", "int8", "int4", "fp8"])
def test_the_counted_bytes_of_rounded_experts_are_those_held(tmp_path: Path, quant):
    runner = TinyModel.make("mixtral", tmp_path).runner(dtype="bfloat16", quant=quant)
    held = held_bytes(runner.loaded.model) + sum(
        sum(getattr(numbers, name).nbytes for name in ("weight", "scale"))
        for module in runner.loaded.model.modules()
        for numbers in rounded_in(module)
    )
    held += sum(
        packed.gate_up.tensor.nbytes + packed.down.tensor.nbytes
        for module in runner.loaded.model.modules()
        if (packed := getattr(module, "packed", None)) is not None
    )
    taken = census.take(CONFIGS["mixtral"](), torch.bfloat16, None, quant, 1, True)
    assert taken.rank.weight_bytes == runner._weights == held


def rounded_in(module: torch.nn.Module) -> list[object]:
    if isinstance(module, QuantLinear):
        return [module.numbers]
    experts = getattr(module, "rounded", None)
    return [] if experts is None else [*experts.gate_up, *experts.down]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_two_ranks_hold_half_of_the_matrices_and_of_the_kv(name):
    taken = take(name, num_ranks=2)
    whole, rank = taken.whole.size, taken.rank.size
    assert rank.num_linear * 2 == whole.num_linear
    assert rank.head == -(-301 // 2) * 64  # the last one has the odd row
    assert (rank.num_heads, rank.num_kv_heads) == (2, 1)
    assert taken.rank.kv_bytes_per_token * 2 == taken.whole.kv_bytes_per_token


def test_ranks_that_gather_whole_heads_hold_the_whole_kv():
    taken = take("phi3", num_ranks=2)
    assert taken.rank.kv_bytes_per_token == taken.whole.kv_bytes_per_token
    assert taken.rank.weight_bytes < taken.whole.weight_bytes


def test_a_split_that_a_worker_refuses_is_refused_in_its_words():
    with pytest.raises(ModelError, match="cannot be split over 2 ranks"):
        take("mixtral", num_ranks=2)


def test_windows_are_those_of_the_layers():
    assert take("gemma3").whole.size.windows == (12, 12, 0)


def test_a_directory_needs_a_configuration_only(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(ALL["qwen3"]().to_dict()))
    assert census.read_config(str(tmp_path)).model_type == "qwen3"


def test_the_recorded_steps_that_are_planned_for_are_those_of_a_worker():
    assert len(bucket_sizes(sizing.MAX_RUNNING)) == sizing._NUM_GRAPHS
