"""A LoRA adapter in PEFT's files, added to a running `headgate up`, answers as transformers with merged weights does."""

from __future__ import annotations

import concurrent.futures
import copy
import json
import time
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from gateway.cli.model import demo_model_path

MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
PROMPT = "The keeper of the canal opened the gate and"
NUM_TOKENS = 16
RANK, ALPHA = 4, 8
EXACT = {"HEADGATE_ENGINE_DTYPE": "float32"}
"""As the reference computes."""


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()


def write_adapter(directory: Path, reference: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Random, large enough to be heard; returns the model with it merged in."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(reference), {}
    for path, module in merged.named_modules():
        if path.endswith(MODULES):
            outs, ins = module.weight.shape
            down = torch.randn((RANK, ins), generator=generator) * 0.05
            up = torch.randn((outs, RANK), generator=generator) * 0.05
            with torch.no_grad():
                module.weight += ALPHA / RANK * up @ down
            tensors[f"base_model.model.{path}.lora_A.weight"] = down
            tensors[f"base_model.model.{path}.lora_B.weight"] = up
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config["target_modules"] = list(MODULES)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return merged


TOKENIZER = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
IDS = TOKENIZER.encode(PROMPT).ids


def expected(model: PreTrainedModel) -> str:
    ids = torch.tensor([IDS])
    how = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, ids.shape[1] :]
    return TOKENIZER.decode(out.tolist())


def answer(server, model: str) -> openai.types.Completion:
    return server.client().completions.create(
        model=model,
        prompt=IDS,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "min_tokens": NUM_TOKENS},
    )


def add(server, name: str, path: Path) -> dict:
    done = server.command("adapters", "add", server.model, name, str(path), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(480)  # two starts of a whole server
def test_adapters_come_and_go_while_others_are_served(start_server, tmp_path, reference):
    server = start_server(env=EXACT)
    merged = {
        name: write_adapter(tmp_path / "adapters" / name, reference, seed)
        for seed, name in enumerate(("poet", "clerk"))
    }
    made = {name: add(server, name, tmp_path / "adapters" / name) for name in merged}
    models = {server.model: reference}
    models |= {made[name]["served_as"]: model for name, model in merged.items()}
    wanted = {model: expected(weights) for model, weights in models.items()}
    assert len(set(wanted.values())) == 3, "an adapter that changes nothing shows nothing"
    alone = {model: answer(server, model).choices[0].text for model in models}
    assert alone == wanted
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = list(models) * 3
        together = list(pool.map(lambda model: answer(server, model).choices[0].text, asked))
    assert together == [wanted[model] for model in asked]
    listed = json.loads(server.command("adapters", "list", "--json").stdout)
    assert {(one["served_as"], one["state"]) for one in listed} == {
        (one["served_as"], "loaded") for one in made.values()
    }

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
    refused = server.command("adapters", "add", server.model, "broken", str(tmp_path / "broken"))
    assert refused.returncode != 0
    assert "cannot be read" in refused.stderr

    assert server.command("adapters", "remove", made["clerk"]["id"]).returncode == 0
    with pytest.raises(openai.NotFoundError):
        answer(server, made["clerk"]["served_as"])
    server.verify_books()
    assert server.stop() == 0

    again = start_server(env=EXACT)
    for _ in range(100):
        (listed,) = json.loads(again.command("adapters", "list", "--json").stdout)
        if listed["state"] == "loaded":
            break
        time.sleep(0.1)
    poet = made["poet"]["served_as"]
    assert answer(again, poet).choices[0].text == wanted[poet]
