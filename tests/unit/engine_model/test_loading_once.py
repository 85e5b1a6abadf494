"""While a model is loaded no weight is held twice for longer than its layer is replaced."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from tiny_models import TinyModel
from transformers import PreTrainedModel

from kernels.dispatch import TWINS, Ops
from workers.engine.checkpoint import checkpoint, loader
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.model import hf, llama, probe
from workers.engine.parallel.group import ALONE

CPU = torch.device("cpu")


def loaded(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    found = checkpoint.find(str(TinyModel.make("llama", directory).directory))
    model = loader.build(loader.read_config(found), dtype, CPU, hf.ATTENTION)
    loader.fill(model, found, CPU)
    return model


@torch.inference_mode()
def test_products_of_a_replaced_layer_are_given_up_with_it(tmp_path: Path) -> None:
    model, ops, step = loaded(tmp_path, torch.float32), Ops(CPU, dict(TWINS)), hf.StepSlot()
    sites = hf.discover(model)
    old = [weakref.ref(site.module.q_proj) for site in sites]
    store = KVStore(KVShape(len(sites), sites[0].num_kv_heads, sites[0].head_dim, 4, torch.float32), 0, CPU, ops)
    assert llama.install(model, sites, store, ops, step) == len(sites)
    assert [ref() for ref in old] == [None] * len(sites)
    assert [site.module for site in sites] == list(model.model.layers)


@torch.inference_mode()
def test_the_check_widens_no_more_rows_of_the_vocabulary_than_it_has(tmp_path: Path) -> None:
    model = loaded(tmp_path, torch.bfloat16)
    config = probe._small_config(model.config, 1)
    mine, theirs = (loader.build(config, torch.float32, CPU, hf.ATTENTION) for _ in range(2))
    probe._copy_weights(model, mine, theirs, ALONE)
    for small in (mine, theirs):
        for table in (small.get_input_embeddings().weight, small.get_output_embeddings().weight):
            assert table.untyped_storage().nbytes() == config.vocab_size * config.hidden_size * 4
            assert len(table) < model.config.vocab_size
