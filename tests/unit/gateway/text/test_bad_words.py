"""Words that may not be said, as tokens: each as it begins a text and as it follows a space."""

from __future__ import annotations

import json

import pytest
from byte_model import tokenizer_spec, write_byte_model

from gateway.base.errors import ApiError
from gateway.base.settings import ModelSource
from gateway.generation.served.model_files import load
from gateway.schema.sampling import SamplingFields, check_bans

MERGES = [("c", "a"), ("ca", "t"), ("Ġ", "cat"), ("Ġ", "d"), ("Ġd", "o"), ("Ġdo", "g"), ("o", "g")]


@pytest.fixture
def model(tmp_path):
    """The byte tokenizer, and a few merges: 'cat', ' cat' and ' dog' are tokens, 'dog' is two."""
    directory = write_byte_model(tmp_path / "model")
    spec = tokenizer_spec()
    spec["model"]["merges"] = [list(pair) for pair in MERGES]
    spec["model"]["vocab"] |= {a + b: 259 + i for i, (a, b) in enumerate(MERGES)}
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    return load("m", ModelSource(path=str(directory)))


def texts(model, *words):
    return [tuple(model.tokenizer.decode([token]) for token in ids) for ids in model.encode_bad_words(words)]


def test_a_word_is_banned_with_and_without_a_space_before_it(model):
    assert texts(model, "cat") == [("cat",), (" cat",)]
    assert texts(model, "dog") == [("d", "og"), (" dog",)], "of another number of tokens"


def test_spaces_before_a_word_make_no_difference(model):
    assert model.encode_bad_words(["  cat", "cat"]) == model.encode_bad_words(["cat"])


def test_what_another_word_bans_already_is_left_out(model):
    assert texts(model, "t", "at", "xt") == [("t",)], "' t' ends with 't', as the others do"


def test_space_itself_is_a_word(model):
    assert texts(model, " ") == [(" ",)]
    assert texts(model, "\n") == [("\n",)]


def test_no_control_token_is_made_of_a_word(model):
    assert all(len(ids) > 1 for ids in model.encode_bad_words(["<|eos|>"]))


def test_something_must_be_left_besides_ends_that_may_not_come(model):
    def check(words=(), **fields):
        check_bans(SamplingFields(model="m", **fields), words, 259, model.end_ids)

    assert model.end_ids == (257, 258)
    check(allowed_token_ids=(257,))
    check(((257,),), allowed_token_ids=(257, 7), min_tokens=1)
    check(((7, 7),), allowed_token_ids=(7,))
    check(tuple((i,) for i in range(258)))
    for words, fields in [
        ((), {"allowed_token_ids": (257, 258), "min_tokens": 1}),
        (((7,),), {"allowed_token_ids": (7,)}),
        (((7,),), {"allowed_token_ids": (7, 9), "min_tokens": 1, "stop_token_ids": (9,)}),
        (tuple((i,) for i in range(259)), {}),
    ]:
        with pytest.raises(ApiError) as caught:
            check(words, **fields)
        assert caught.value.param == ("allowed_token_ids" if fields else "bad_words")
