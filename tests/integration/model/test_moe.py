"""Models with experts: their blocks on the kernels' ops, and checkpoints with stacked experts and with single ones."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from stored_models import log_probabilities
from tiny_models import Driven, TinyModel, drive
from torch import nn

from kernels import dispatch
from kernels.reference import linear as formats
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.layers import moe
from workers.engine.layers.moe import MoeBlock
from workers.engine.values.errors import ModelError
from workers.protocol.messages import SamplingParams

TinyModels = Callable[[str], TinyModel]
OPS = dispatch.choose(torch.device("cpu"))
BLOCKS = {"mixtral": 3, "qwen3_moe": 2}


def start(directory: Path) -> ModelRunner:
    return ModelRunner(RunnerSettings(str(directory), num_blocks=48, block_size=4, device="cpu"))


def weights_of(runner: ModelRunner) -> list[torch.Tensor]:
    blocks = [m for m in runner.loaded.model.modules() if isinstance(m, MoeBlock)]
    return [tensor for block in blocks for tensor in stacks_of(block)]


def stacks_of(block: MoeBlock) -> list[torch.Tensor]:
    """The experts of a block in float32, out of its panels if it has any."""
    if block.packed is None:
        return [block._gate_up, block._down]
    number = block.packed.router.out_features
    weights = (block.packed.gate_up, block.packed.down)
    return [weight.tensor.transpose(1, 2).reshape(number, -1, weight.in_features) for weight in weights]


def rewritten(model: TinyModel, directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the checkpoint with other tensors."""
    shutil.copytree(model.directory, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def stack(reference: nn.Module) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.clear()
        tensors |= {name: tensor.clone() for name, tensor in reference.state_dict().items()}

    return change


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_with_experts_is_replaced(tiny_model: TinyModels, name):
    blocks = [type(m).__name__ for m in tiny_model(name).runner().loaded.model.modules()]
    assert blocks.count("MoeBlock") == BLOCKS[name]
    assert not any("Experts" in block for block in blocks)


@pytest.mark.parametrize("name", BLOCKS)
def test_stacked_and_single_experts_are_the_same_weights(tiny_model: TinyModels, tmp_path, name):
    model = tiny_model(name)
    single = load_file(model.directory / "model.safetensors")
    assert any(".experts.0." in tensor for tensor in single)
    stacked = rewritten(model, tmp_path / "stacked", stack(model.reference))
    expected = [
        tensor
        for name, tensor in model.reference.state_dict().items()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    for directory in (model.directory, stacked):
        found = weights_of(start(directory))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_checkpoint_without_one_expert_is_refused(tiny_model: TinyModels, tmp_path):
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    directory = rewritten(tiny_model("qwen3_moe"), tmp_path / "m", lambda t: t.pop(name))
    with pytest.raises(ModelError, match=r"lacks expert 5 of model\.layers\.2\.mlp\.experts"):
        start(directory)


def test_an_expert_too_many_is_refused(tiny_model: TinyModels, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.experts.{}.up_proj.weight"
        tensors[name.format(6)] = tensors[name.format(0)].clone()

    with pytest.raises(ModelError, match=r"experts\.6\.up_proj\.weight is of an expert"):
        start(rewritten(tiny_model("qwen3_moe"), tmp_path / "m", change))


def test_an_expert_of_another_shape_is_refused(tiny_model: TinyModels, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.experts.0.up_proj.weight"
        tensors[name] = tensors[name].T.contiguous()

    with pytest.raises(ModelError, match=r"has shape \[64, 48\], but the model needs \[48, 64\]"):
        start(rewritten(tiny_model("qwen3_moe"), tmp_path / "m", change))


def test_a_stack_beside_its_experts_is_refused(tiny_model: TinyModels, tmp_path):
    model = tiny_model("qwen3_moe")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = model.reference.state_dict()[name].clone()

    with pytest.raises(ModelError, match="whole and by expert"):
        start(rewritten(model, tmp_path / "m", change))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_stream_is_the_same_alone_and_in_a_batch(tiny_model: TinyModels, name):
    runner = tiny_model(name).runner()
    params = SamplingParams(seed=5, temperature=0.9, min_tokens=99)

    def prompt_of(length: int) -> list[int]:
        return random.Random(length).choices(range(3, 301), k=length)

    def stream(others: int) -> list[int]:
        watched = Driven(prompt_of(17), params)
        drive(runner, [watched, *(Driven(prompt_of(5 + i), params, i) for i in range(others))], 12)
        return watched.output

    assert stream(0) == stream(3)


# --- rounded experts ---


def on_grid(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """`[outputs, inputs]`, rounded and widened."""
    if kind == "int8":
        return formats.dequantize_int8(*formats.quantize_int8(weight), weight.dtype)
    group = max(g for g in formats.GROUPS if weight.shape[1] % g == 0)
    return formats.dequantize_int4(*formats.quantize_int4(weight, group), weight.dtype).T


def rounded(reference: nn.Module, kind: str) -> nn.Module:
    """transformers' model with every linear layer's and every expert's weight on the grid of the format."""
    model = copy.deepcopy(reference)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            module.weight.copy_(on_grid(module.weight, kind))
        elif moe.stacks_experts(module):
            for stack in module.parameters():
                stack.copy_(torch.stack([on_grid(weight, kind) for weight in stack]))
    return model


@pytest.mark.parametrize(("name", "kind"), [("mixtral", "int8"), ("mixtral", "int4"), ("qwen3_moe", "int8")])
def test_logits_are_those_of_rounded_experts(tiny_model: TinyModels, name, kind):
    model = tiny_model(name)
    runner = model.runner(quant=kind)
    blocks = [m for m in runner.loaded.model.modules() if isinstance(m, MoeBlock)]
    assert len(blocks) == BLOCKS[name]
    assert all(block.rounded is not None and block._down.numel() == 0 for block in blocks)
    found, expected = log_probabilities(runner, rounded(model.reference, kind))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert (log_probabilities(runner, model.reference)[1] - found).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["fp8", "w8a8", "llm_int8"])
def test_formats_that_round_activations_leave_experts_alone(tiny_model: TinyModels, kind):
    runner = tiny_model("mixtral").runner(quant=kind)
    blocks = [m for m in runner.loaded.model.modules() if isinstance(m, MoeBlock)]
    assert blocks and all(block.rounded is None for block in blocks)


def test_experts_that_int4_cannot_cut_are_refused(tiny_model: TinyModels):
    with pytest.raises(ModelError, match="groups of 32, but one has 48"):
        tiny_model("qwen3_moe").runner(quant="int4")


def test_rounded_experts_are_kv_of_their_own(tiny_model: TinyModels):
    roots = {tiny_model("mixtral").runner(quant=kind).root for kind in ("none", "int8", "int4")}
    assert len(roots) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_rounded_block_is_the_exact_block_of_its_grid(monkeypatch: pytest.MonkeyPatch, kind, dtype):
    monkeypatch.setattr(moe, "has_panels", lambda _: False)  # both by the op, which rounds as the rounded block does
    model = blocks_of("mixtral", intermediate_size=64).to(dtype)
    exact = copy.deepcopy(model)
    for stack in exact.model.layers[0].mlp.experts.parameters():
        stack.copy_(torch.stack([on_grid(weight, kind) for weight in stack]))
    moe.install(exact, OPS)
    moe.install(model, OPS, kind)
    x = torch.randn(3, 5, 32).to(dtype)
    assert torch.equal(model.model.layers[0].mlp(x), exact.model.layers[0].mlp(x))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_rounded_block_is_the_sum_over_experts_in_float64(kind):
    model = blocks_of("mixtral", intermediate_size=64)
    gate_up, down = (
        torch.stack([on_grid(weight, kind) for weight in stack]).double()
        for stack in (model.model.layers[0].mlp.experts.gate_up_proj, model.model.layers[0].mlp.experts.down_proj)
    )
    moe.install(model, OPS, kind)
    block, x = model.model.layers[0].mlp, torch.randn(9, 32)
    weights, experts = block.route(x)
    expected = torch.zeros(9, 32, dtype=torch.float64)
    for token in range(9):
        for share, expert in zip(weights[token], experts[token], strict=True):
            gate, up = (gate_up[expert] @ x[token].double()).chunk(2)
            expected[token] += share * (down[expert] @ (nn.functional.silu(gate) * up))
    torch.testing.assert_close(block(x).double(), expected, atol=1e-6, rtol=1e-5)


def test_who_waits_for_the_choice_and_who_does_not_widen_the_same_experts():
    model = blocks_of("mixtral", intermediate_size=64)
    moe.install(model, OPS, "int8")
    stacks = model.model.layers[0].mlp.rounded
    chosen = torch.tensor([[3, 1], [1, 3]], dtype=torch.int32)
    some, _, places = stacks.stacks(chosen, waits=True)
    every, _, ids = stacks.stacks(chosen, waits=False)
    assert (len(some), len(every)) == (2, 4)
    assert places.dtype == ids.dtype == torch.int32
    assert torch.equal(some[places.long()], every[ids.long()])


def test_a_token_has_the_same_bits_alone_and_among_others_with_rounded_experts():
    model = blocks_of("mixtral", intermediate_size=64)
    moe.install(model, OPS, "int4")
    block, x = model.model.layers[0].mlp, torch.randn(40, 32)
    together = block(x)
    for number in (1, 2, 3, 7):
        assert torch.equal(block(x[:number]), together[:number])


def blocks_of(name: str, **changes: object) -> nn.Module:
    config = {
        "mixtral": transformers.MixtralConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "qwen2_moe": transformers.Qwen2MoeConfig,
    }[name](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=changes.pop("intermediate_size", 48),
        moe_intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        **{"num_experts": 4, "num_local_experts": 4} if name != "mixtral" else {"num_local_experts": 4},
        **changes,
    )
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_block_is_replaced_with_and_without_renormalised_weights(dtype, renormalise):
    model = blocks_of("qwen3_moe", norm_topk_prob=renormalise).to(dtype)
    theirs = copy.deepcopy(model.model.layers[0].mlp)
    assert moe.install(model, OPS) == 1
    x = torch.randn(3, 5, 32).to(dtype)
    limit = moe.TOLERANCE[dtype] * theirs(x).abs().max().item()
    torch.testing.assert_close(model.model.layers[0].mlp(x), theirs(x), atol=limit, rtol=0)


def test_a_token_has_the_same_bits_alone_and_among_others():
    model = blocks_of("mixtral")
    moe.install(model, OPS)
    block, x = model.model.layers[0].mlp, torch.randn(40, 32)
    weights, experts = block.route(x)
    together = block.run(x, weights, experts)
    for number in (1, 2, 3, 7):
        alone = block.run(x[:number], weights[:number], experts[:number])
        assert torch.equal(alone, together[:number])


def test_all_tokens_may_take_one_expert_and_leave_the_others_empty():
    model = blocks_of("mixtral")
    theirs = copy.deepcopy(model.model.layers[0].mlp)
    moe.install(model, OPS)
    mine = model.model.layers[0].mlp
    x = torch.rand(1, 9, 32)
    for block, router in ((theirs, theirs.gate.weight), (mine, mine.router)):
        router.zero_()
        router[2], router[0] = 5.0, 3.0
        assert block is theirs or mine.route(x[0])[1].tolist() == [[2, 0]] * 9
    torch.testing.assert_close(mine(x), theirs(x), atol=1e-6, rtol=1e-4)


def test_a_block_that_computes_something_else_stays(caplog):
    """Its experts gate with another function."""
    model = blocks_of("mixtral", hidden_act="gelu")
    before = model.model.layers[0].mlp
    assert moe.install(model, OPS) == 0
    assert model.model.layers[0].mlp is before
    assert "layers.0.mlp stays transformers' own: off by" in caplog.text


def test_a_block_with_a_shared_expert_is_not_touched():
    model = blocks_of("qwen2_moe", decoder_sparse_step=1, shared_expert_intermediate_size=48)
    assert hasattr(model.model.layers[0].mlp, "shared_expert")
    assert moe.install(model, OPS) == 0
