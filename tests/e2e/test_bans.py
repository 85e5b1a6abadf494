"""The demo model says something else where what it says is banned: as transformers does with the same words."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from gateway.cli.model import demo_model_path

PROMPT = "The keeper of the canal opened the gate and"
NUM_TOKENS = 24
TOKENIZER = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
IDS = TOKENIZER.encode(PROMPT).ids


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def reference():
    """Greedy output ids of the model, some words banned."""
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()

    def generate(words: list[str]) -> list[int]:
        ids = torch.tensor([IDS])
        given = [text for word in words for text in (word.lstrip(" "), f" {word.lstrip(' ')}")]
        how = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
        if words:
            how["bad_words_ids"] = [encoded(text) for text in given]
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return out[0, ids.shape[1] :].tolist()

    return generate


def say(server, **extra):
    return (
        server.client()
        .completions.create(
            model=server.model,
            prompt=IDS,
            max_tokens=NUM_TOKENS,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True, "min_tokens": NUM_TOKENS} | extra,
        )
        .choices[0]
    )


def test_a_word_of_two_tokens_and_one_of_one_are_not_said_as_in_transformers(start_server, reference):
    server = start_server(env={"HEADGATE_ENGINE_DTYPE": "float32"})  # that of the reference
    free = reference([])
    assert say(server).text == TOKENIZER.decode(free)
    texts = [TOKENIZER.decode([token]) for token in free]
    pairs = [texts[i] + texts[i + 1] for i in range(2, NUM_TOKENS - 1)]
    pair = next(text for text in pairs if text.strip() and len(encoded(text.lstrip(" "))) == 2)
    single = next(text for text in texts if len(encoded(text.lstrip(" "))) == 1)
    for words in ([pair], [single], [pair, single]):
        without = reference(words)
        assert without != free
        assert say(server, bad_words=words).text == TOKENIZER.decode(without)


def test_only_allowed_tokens_are_said(server, reference):
    allowed = sorted(set(reference([])))[:5]
    choice = say(server, allowed_token_ids=allowed)
    assert len(choice.logprobs.tokens) == NUM_TOKENS
    assert {*choice.logprobs.tokens} <= {TOKENIZER.decode([token]) for token in allowed}
