"""Vectors and scores equal those that transformers computes by the formulas of sentence-transformers, for each family and
each pooling."""

from __future__ import annotations

import json
from array import array
from itertools import product
from pathlib import Path

import pooling_models
import pytest
import torch
from pooling_models import ENCODERS, make, make_classifier
from tiny_models import TinyModel
from transformers import AutoModelForSequenceClassification

from workers.engine.device.encoder import EncoderRunner
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row
from workers.engine.values.probe import Pooled

LENGTHS = (1, 2, 5, 17, 30, 31, 3)
COSINE = 0.9999
STEPS = ("plain", "device")


def texts(lengths=LENGTHS, first=3):
    return [[first + (13 * n * n + 29 * length + 7 * n) % 290 for n in range(length)] for length in lengths]


def settings(directory, **changes):
    given = {"num_blocks": 96, "block_size": 4, "device": "cpu", "max_batch_tokens": 64}
    return RunnerSettings(str(directory), **given | changes)


def numbers(answer):
    found = array("f")
    found.frombytes(answer)
    return torch.tensor(found)


def whole(runner, inputs, **probe):
    """All inputs as whole rows of one step."""
    rows, first = [], 1
    for tokens in inputs:
        num_blocks = -(-len(tokens) // runner.block_size)
        table = list(range(first, first + num_blocks))
        rows.append(Row(tokens, 0, table, row_id=len(rows), probe=Pooled(len(tokens), **probe)))
        first += num_blocks
    return [numbers(result.probed) for result in runner.execute(rows)]


def chunked(runner, tokens, size):
    """One input in chunks; what a row answers is told to the next one."""
    table = list(range(1, 1 + -(-len(tokens) // runner.block_size)))
    answer = None
    for start in range(0, len(tokens), size):
        probe = Pooled(len(tokens), answer if start else None)
        (result,) = runner.execute([Row(tokens[start : start + size], start, table, row_id=0, probe=probe)])
        answer = result.probed
    return numbers(answer)


def assert_equal(found, expected):
    assert found.shape == expected.shape
    assert torch.cosine_similarity(found, expected, dim=0) >= COSINE
    assert found.norm() == pytest.approx(float(expected.norm()), rel=1e-4)


@pytest.mark.parametrize("mode", ["last", "mean"])
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("qwen3", "plain"),
        ("qwen3", "device"),
        ("gemma2", "plain"),
        *(pytest.param(*pair, marks=pytest.mark.rest) for pair in product(("llama", "mistral", "gpt2"), STEPS)),
    ],
)
def test_a_decoder_gives_the_vectors_of_transformers_over_paged_kv(name, mode, steps, tmp_path):
    model = make(name, tmp_path, mode)
    runner = ModelRunner(settings(tmp_path, steps=steps))
    assert runner.abilities.tasks == ("embed",) and runner.abilities.reuses_kv == (mode == "last")
    inputs = texts()
    for tokens, found in zip(inputs, whole(runner, inputs), strict=True):
        assert_equal(found, model.vector(tokens))
    for size in (1, 7, 16):
        assert_equal(chunked(runner, inputs[4], size), model.vector(inputs[4]))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *product(ENCODERS, ["mean"]),
        ("bert", "cls"),
        ("bert", "last"),
        *(pytest.param(n, m, marks=pytest.mark.rest) for n in ENCODERS for m in ("cls", "last") if n != "bert"),
    ],
)
def test_an_encoder_gives_the_vectors_of_transformers(name, mode, tmp_path):
    model = make(name, tmp_path, mode)
    runner = EncoderRunner(settings(tmp_path))
    assert runner.abilities.is_whole and not runner.abilities.reuses_kv
    inputs = texts((*LENGTHS, 100, runner.max_model_len))
    for tokens, found in zip(inputs, whole(runner, inputs), strict=True):
        assert_equal(found, model.vector(tokens))


@pytest.mark.parametrize(("name", "mode"), [("bert", "mean"), ("qwen3", "last")])
@pytest.mark.parametrize("normalises", [True, False])
def test_layers_behind_the_pooling_run_as_the_model_says(name, mode, normalises, tmp_path):
    model = make(name, tmp_path, mode, normalises=normalises, dense=48)
    runner = (EncoderRunner if name == "bert" else ModelRunner)(settings(tmp_path))
    assert runner.abilities.vector_size == 48
    for tokens, found in zip(texts(), whole(runner, texts()), strict=True):
        assert_equal(found, model.vector(tokens))


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_a_vector_is_cut_and_has_length_one_again(name, tmp_path):
    model = make(name, tmp_path, "mean", matryoshka_dimensions=[16, 32, 64])
    runner = (EncoderRunner if name == "bert" else ModelRunner)(settings(tmp_path))
    assert runner.abilities.dimensions == (16, 32)
    for tokens, found in zip(texts(), whole(runner, texts(), dimensions=16), strict=True):
        assert_equal(found, model.vector(tokens, 16))


def test_an_encoder_without_modules_is_pooled_by_the_mean(tmp_path):
    model = make("bert", tmp_path, "mean", modules=False)
    runner = EncoderRunner(settings(tmp_path))
    for tokens, found in zip(texts(), whole(runner, texts()), strict=True):
        assert_equal(found, model.vector(tokens))


def test_a_decoder_pools_its_last_token_if_it_is_asked_to_embed(tmp_path):
    model = TinyModel.make("llama", tmp_path)
    runner = model.runner(task="embed", max_batch_tokens=64, num_blocks=96)
    for tokens, found in zip(texts(), whole(runner, texts()), strict=True):
        hidden = model.reference.model(torch.tensor([tokens])).last_hidden_state[0, -1]
        assert_equal(found, hidden / hidden.norm())


def test_kv_of_another_input_changes_no_vector_of_a_last_token(tmp_path):
    """The first tokens of an input are in blocks that another input filled."""
    model = make("qwen3", tmp_path, "last")
    runner = ModelRunner(settings(tmp_path))
    one, other = texts((30,))[0], [*texts((30,))[0][:20], 9, 8, 7]
    runner.execute([Row(one, 0, list(range(1, 9)), row_id=0, probe=Pooled(30))])
    table = [1, 2, 3, 4, 5, 20]
    (result,) = runner.execute([Row(other[20:], 20, table, row_id=0, probe=Pooled(23))])
    assert_equal(numbers(result.probed), model.vector(other))


@pytest.mark.parametrize(("name", "squashes"), [*product(ENCODERS, [True]), ("bert", False)])
def test_a_cross_encoder_gives_the_scores_of_transformers(name, squashes, tmp_path):
    told = {} if squashes else {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    model = make_classifier(name, tmp_path, **told)
    runner = EncoderRunner(settings(tmp_path))
    assert runner.abilities.tasks == ("score",) and runner.abilities.pairs == "segments"
    inputs = texts()
    takes_segments = (getattr(model.config, "type_vocab_size", 0) or 0) > 1
    rows = [Row(t, 0, [], probe=Pooled(len(t), segment=min(2, len(t)))) for t in inputs]
    for tokens, result in zip(inputs, runner.execute(rows), strict=True):
        given = {"input_ids": torch.tensor([tokens])}
        if takes_segments:
            given["token_type_ids"] = torch.tensor([[int(n >= 2) for n in range(len(tokens))]])
        logit = model(**given).logits[0]
        expected = torch.sigmoid(logit) if squashes else logit
        assert numbers(result.probed) == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("steps", ["plain", "device"])
def test_a_decoder_with_a_classifier_gives_the_scores_of_transformers(steps, tmp_path):
    model = make_classifier("qwen3", tmp_path)
    assert isinstance(model, type(AutoModelForSequenceClassification.from_config(model.config)))
    runner = ModelRunner(settings(tmp_path, steps=steps))
    for tokens, found in zip(texts(), whole(runner, texts()), strict=True):
        expected = torch.sigmoid(model(input_ids=torch.tensor([tokens])).logits[0])
        assert found == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-5)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("steps", ["plain", "device"])
def test_labels_are_weighed_by_their_two_logits_at_the_last_token(steps, tmp_path):
    """As Qwen3-Reranker's model card computes it: the softmax over the logits of no and yes."""
    model = TinyModel.make("qwen3", tmp_path, tie_word_embeddings=True)
    runner = model.runner(task="score", steps=steps, max_batch_tokens=64, num_blocks=96)
    yes, no = 40, 77
    for tokens, found in zip(texts(), whole(runner, texts(), labels=(yes, no)), strict=True):
        logits = model.reference(torch.tensor([tokens])).logits[0, -1]
        expected = torch.log_softmax(logits[[no, yes]], dim=0)[1].exp()
        assert found.tolist() == pytest.approx([float(expected)], rel=1e-4, abs=1e-6)


def test_an_input_depends_on_no_other_in_its_pass(tmp_path):
    make("bert", tmp_path, "mean")
    runner = EncoderRunner(settings(tmp_path))
    inputs = texts((5, 6, 7, 40))
    for tokens, found in zip(inputs, whole(runner, inputs), strict=True):
        assert torch.allclose(found, whole(runner, [tokens])[0], atol=1e-6)


def _modules(directory, *kinds, pooling=None):
    entries = [{"path": f"{n}_{kind}", "type": f"a.{kind}"} for n, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(entries))
    if pooling is not None:
        folder = directory / f"{kinds.index('Pooling')}_Pooling"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("kinds", "pooling", "sentence"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "not one of cls, mean, last"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "not one of"),
        (("Transformer", "Pooling", "LayerNorm"), {"pooling_mode_mean_tokens": True}, "has a module LayerNorm"),
    ],
)
def test_a_pooling_that_is_not_known_is_refused(kinds, pooling, sentence, tmp_path):
    make("bert", tmp_path, "mean")
    _modules(tmp_path, *kinds, pooling=pooling)
    with pytest.raises(ModelError, match=sentence):
        EncoderRunner(settings(tmp_path))


def test_no_module_lies_outside_of_the_model(tmp_path):
    make("bert", tmp_path, "mean")
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "../other", "type": "a.Pooling"}]))
    with pytest.raises(ModelError, match="outside of the model"):
        EncoderRunner(settings(tmp_path))


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path):
    pooling_models.make("bert", tmp_path, "mean", num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="lacks"):
        EncoderRunner(settings(tmp_path))


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    make_classifier("bert", tmp_path, num_labels=3)
    with pytest.raises(ModelError, match="3 labels"):
        EncoderRunner(settings(tmp_path))
