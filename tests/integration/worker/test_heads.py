"""Heads that look ahead: read from a file, trained on a model's own text until their guesses are right, and changing no
token whether they are or not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from engine_driver import Driver
from fakes import generate_request
from proposing import speculating
from safetensors.torch import save_file
from tiny_models import TinyModel

from workers.engine.model.heads import Head, Heads, load
from workers.engine.settings import WorkerSettings
from workers.engine.speculate.heads import HeadsProposer, grow
from workers.engine.techniques import speculation
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row, SampleSpec
from workers.engine.values.probe import HiddenStates
from workers.engine.values.token_tree import Proposal
from workers.protocol.messages import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(seed=3, temperature=0.0, ignore_eos=True)
PROMPTS = [[5 + i, 17, 90 - i, 41] for i in range(6)]
NUM_HEADS = 3


def saved(heads: Heads) -> dict[str, torch.Tensor]:
    """Returns the weights as `load` reads them."""
    found = {}
    for k, head in enumerate(heads.heads):
        assert isinstance(head, Head)
        for i, block in enumerate(head.blocks):
            found[f"{k}.{i}.linear.weight"] = block.get_parameter("weight").detach()
            found[f"{k}.{i}.linear.bias"] = block.get_parameter("bias").detach()
        found[f"{k}.{len(head.blocks)}.weight"] = head.project.weight.detach()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel.make("llama", tmp_path_factory.mktemp("llama"))


def generated(runner, speculate=None, num_tokens=48):
    drive = Driver(runner, speculate=speculate)
    for i, prompt in enumerate(PROMPTS):
        asked = generate_request(f"r{i}", prompt, num_tokens, sampling=GREEDY, root=runner.root)
        drive.send(asked)
    drive.run().check_idle()
    return drive, [drive.tokens[1, f"r{i}", 0] for i in range(len(PROMPTS))]


def states(runner, tokens):
    """The last hidden state at each token, as rows are told it."""
    draws = tuple(SampleSpec(GREEDY, 0, 1 + i, tokens[:1], tokens[1 : 1 + i]) for i in range(len(tokens)))
    blocks = range(1, 2 + len(tokens) // runner.block_size)
    row = Row(tokens, 0, list(blocks), draws, num_proposed=len(tokens) - 1, row_id=0, probe=HiddenStates())
    (result,) = runner.execute([row])
    return result.probed


def trained(runner, texts):
    """A few seconds of teaching each head the token that comes so much later."""
    torch.manual_seed(0)
    hidden = [states(runner, text).clone() for text in texts]
    heads = Heads(NUM_HEADS, hidden[0].shape[1], runner.vocab_size)
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.01)
    for _ in range(60):
        loss = torch.zeros(())
        for text, seen in zip(texts, hidden, strict=True):
            logits = heads(seen)
            for k in range(NUM_HEADS):
                targets = torch.tensor(text[k + 2 :])
                loss = loss + torch.nn.functional.cross_entropy(logits[k][: len(targets)], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads


def test_trained_heads_save_steps_and_random_ones_change_nothing(model, tmp_path):
    runner = model.runner(num_blocks=200)
    plain, texts = generated(runner)
    heads = trained(runner, [p + t for p, t in zip(PROMPTS, texts, strict=True)])
    save_file(saved(heads), tmp_path / "medusa_lm_head.safetensors")
    told = WorkerSettings(
        model=str(model.directory),
        threads=1,
        engine_device="cpu",
        engine_block_size=4,
        engine_speculate="heads",
        engine_heads=tmp_path,
    )
    drive, found = generated(runner, partial(speculation, told, runner))
    assert found == texts
    totals = drive.engine.totals
    assert totals.num_accepted > 60
    assert totals.num_steps < 0.7 * plain.engine.totals.num_steps
    random = Heads(NUM_HEADS, heads.heads[0].project.in_features, runner.vocab_size)
    drive, found = generated(runner, speculating(HeadsProposer(random)))
    assert found == texts
    assert drive.engine.totals.num_proposed > 0


def test_heads_are_read_as_they_were_written(tmp_path):
    heads = Heads(2, 8, 30, num_blocks=2)
    save_file(saved(heads), tmp_path / "h.safetensors")
    found = load(tmp_path / "h.safetensors", 8, 30, torch.device("cpu"), torch.float32)
    x = torch.randn(3, 8)
    assert torch.equal(found(x), heads(x))
    assert not any(parameter.requires_grad for parameter in found.parameters())


@pytest.mark.parametrize(("hidden", "vocab", "sentence"), [(9, 30, "do not fit the model"), (8, 31, "size mismatch")])
def test_heads_of_another_model_are_refused(tmp_path, hidden, vocab, sentence):
    save_file(saved(Heads(1, 8, 30)), tmp_path / "h.safetensors")
    with pytest.raises(ModelError, match=sentence):
        load(tmp_path / "h.safetensors", hidden, vocab, torch.device("cpu"), torch.float32)


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "h.safetensors")
    with pytest.raises(ModelError, match="Medusa heads"):
        load(tmp_path / "h.safetensors", 8, 30, torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path / "none.safetensors", 8, 30, torch.device("cpu"), torch.float32)


def test_the_likeliest_branches_get_the_nodes():
    best = [[(1, -0.1), (2, -2.5)], [(3, -0.5), (4, -1.0)]]
    assert grow(best, 2, 2) == Proposal.chain([1, 3])
    tree = grow(best, 2, 4)
    assert [tree.path(node) for node in range(4)] == [[1], [1, 3], [1, 4], [2]]
    assert grow(best, 1, 4).depths == [1, 1]
