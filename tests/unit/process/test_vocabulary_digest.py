from __future__ import annotations

import pytest

from workers.process.vocabulary_digest import vocabulary_digest

VOCAB = {"a": 0, "b": 1, "ab": 2}
END = {"id": 3, "content": "<end>", "special": True}
SPEC = {"model": {"type": "BPE", "vocab": VOCAB, "merges": ["a b"]}, "added_tokens": [END]}


def test_equal_tokens_with_equal_ids_are_one_vocabulary_however_text_is_cut_into_them():
    turned = dict(reversed(VOCAB.items()))
    same = {"added_tokens": [END | {"special": False}], "model": {"vocab": turned, "merges": []}, "normalizer": None}
    assert vocabulary_digest(same) == vocabulary_digest(SPEC) != ""


@pytest.mark.parametrize(
    "other",
    [
        SPEC | {"model": {"vocab": VOCAB | {"a": 1, "b": 0}}},
        SPEC | {"model": {"vocab": VOCAB | {"c": 4}}},
        SPEC | {"added_tokens": [END | {"content": "<stop>"}]},
        SPEC | {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}},
    ],
)
def test_other_tokens_or_ids_are_another_vocabulary(other):
    assert vocabulary_digest(other) not in ("", vocabulary_digest(SPEC))


def test_nothing_is_said_of_a_model_without_a_tokenizer():
    assert vocabulary_digest({}) == vocabulary_digest({"model": {"vocab": {}}}) == ""
