"""Which part of which tensor is a rank's, and the models that cannot be divided. No processes: nothing here computes."""

from __future__ import annotations

import pytest
import tiny_models
import torch
import transformers
from tiny_models import CONFIGS, TinyModel
from transformers import AutoModelForCausalLM

from workers.engine.checkpoint import checkpoint, loader, sharding
from workers.engine.checkpoint.checkpoint import Stored
from workers.engine.loading import threads_of
from workers.engine.model import hf
from workers.engine.parallel.group import Parallel, device_of
from workers.engine.values.errors import ModelError

CPU = torch.device("cpu")


def part_of_model(directory, rank, size):
    found = checkpoint.find(str(directory))
    model = loader.build(loader.read_config(found), torch.float32, CPU, hf.ATTENTION)
    parts = sharding.split(model, Parallel(rank, size))
    loader.fill(model, found, CPU, parts)
    return model, parts


@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("llama-tied-biased", 2), ("qwen3", 4)])
def test_the_parts_of_all_ranks_are_the_whole_tensors(tmp_path, name, size):
    """301 tokens and heads of keys that two ranks share included."""
    model = TinyModel.make(name, tmp_path)
    whole = {key: tensor for key, (tensor, _) in loader.places(model.reference).items()}
    seen = {key: torch.full_like(tensor, float("nan")) for key, tensor in whole.items()}
    for rank in range(size):
        mine, parts = part_of_model(tmp_path, rank, size)
        for key, (tensor, _) in loader.places(mine).items():
            part = parts.get(key)
            place = seen[key]
            if part is not None:
                place = place.narrow(part.dim, part.start, part.end - part.start)
            place.copy_(tensor)
    for key, tensor in whole.items():
        assert torch.equal(seen[key], tensor), key
    assert "model.layers.0.self_attn.o_proj.bias" not in parts


def test_a_rank_reads_no_more_than_its_part(tmp_path, monkeypatch):
    model = TinyModel.make("llama", tmp_path)
    num_read = []
    true_read = Stored.read

    def read(self, part=None):
        tensor = true_read(self, part)
        num_read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Stored, "read", read)
    mine, _ = part_of_model(tmp_path, 1, 2)
    norms = sum(t.numel() for t in model.reference.parameters() if t.dim() == 1)
    whole = sum(t.numel() for t in model.reference.parameters())
    odd_rows = 2 * 32  # of 301 tokens the second rank has 151, in the embedding and in the head
    assert sum(num_read) == (whole - norms) / 2 + odd_rows + norms
    assert sum(t.numel() for t in mine.parameters()) == sum(num_read)


def test_tied_tensors_stay_one_tensor(tmp_path):
    TinyModel.make("llama-tied-biased", tmp_path)
    mine, _ = part_of_model(tmp_path, 0, 2)
    embedding, head = mine.get_input_embeddings().weight, mine.get_output_embeddings().weight
    assert embedding.data_ptr() == head.data_ptr()


def refusal(config, size):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError) as caught:
        sharding.split(model, Parallel(0, size))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_oss", "no plan that splits its layers"),
        ("gpt2", "no plan that splits its layers"),
        ("experts", "mlp.experts as moe_tp_experts, which is not supported"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_plan_cannot_be_followed_is_refused(name, reason):
    configs = {**CONFIGS, "experts": lambda: transformers.MixtralConfig(**tiny_models._COMMON)}
    assert reason in refusal(configs[name](), 2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(4, 2, 3), (6, 3, 2), (6, 2, 4), (4, 4, 8)])
def test_heads_that_do_not_divide_are_refused_with_the_numbers(num_heads, num_kv_heads, size):
    config = transformers.LlamaConfig(
        **tiny_models._COMMON
        | {"hidden_size": 96, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": 16}
    )
    numbers = f"{size} ranks: {num_heads} attention heads and {num_kv_heads} key-value heads"
    assert numbers in refusal(config, size)


def test_a_tensor_beside_split_ones_that_the_plan_forgets_is_refused():
    """Cohere's norm has weights of its own for every head."""
    config = transformers.CohereConfig(**tiny_models._COMMON, use_qk_norm=True)
    assert "does not say how model.layers.0.self_attn.q_norm.weight is split" in refusal(config, 2)


def test_a_style_that_is_not_known_is_refused(monkeypatch):
    config = CONFIGS["llama"]()
    plan = {**config.base_model_tp_plan, "layers.*.mlp.down_proj": "sequence_parallel"}
    monkeypatch.setattr(type(config), "base_model_tp_plan", plan)
    assert "down_proj as sequence_parallel, which is not supported" in refusal(config, 2)


def test_each_rank_has_a_device_of_its_own_or_the_start_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_of("auto", rank, 2) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert device_of("cuda:1", 0, 1) == "cuda:1"
    with pytest.raises(ModelError, match="4 ranks need 4 CUDA devices, and there are 2"):
        device_of("cuda", 0, 4)
    with pytest.raises(ModelError, match="must be auto, cuda or cpu, not cuda:1"):
        device_of("cuda:1", 0, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_of("auto", 1, 2) == "cpu"


def test_the_ranks_of_a_cpu_divide_its_threads():
    assert [threads_of(8, 2), threads_of(1, 4), threads_of(3, 1)] == [4, 1, 3]
    assert threads_of(None, 1) is None  # torch's own default
    assert threads_of(None, 10_000) == 1


def test_ranks_share_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5})
    assert threads_of(None, 2) == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(600))
    assert threads_of(None, 2) == 300
