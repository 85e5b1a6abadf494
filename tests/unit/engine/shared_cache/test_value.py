"""What is read from a store is what was asked for, or refused with the reason."""

from __future__ import annotations

import pytest

from workers.engine.tiers.shared_cache.value import Refused, seal, unseal

SECRET, KIND, NAME = b"s" * 32, b"k" * 16, "ab" * 16
TOKENS, KV = [1, 2, 300_000], bytes(range(200))


def refused(data, secret=SECRET, kind=KIND, name=NAME, tokens=TOKENS, num_bytes=200):
    with pytest.raises(Refused) as raised:
        unseal(secret, kind, name, tokens, num_bytes, data)
    return raised.value.fault


def test_a_sealed_value_gives_its_kv():
    assert bytes(unseal(SECRET, KIND, NAME, TOKENS, len(KV), seal(SECRET, KIND, NAME, TOKENS, KV))) == KV


def test_every_flipped_bit_and_every_cut_is_refused():
    data = seal(SECRET, KIND, NAME, TOKENS, KV)
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1
        assert refused(bytes(flipped)) in ("corrupted", "foreign")
        assert refused(data[:place]) == "truncated"
    assert refused(data + b"\0") == "truncated"


def test_another_kind_of_kv_other_tokens_and_another_secret_are_refused():
    data = seal(SECRET, KIND, NAME, TOKENS, KV)
    assert refused(data, kind=b"x" * 16) == "foreign"
    assert refused(data, tokens=[1, 2, 4]) == "foreign"
    assert refused(data, secret=b"t" * 32) == "corrupted"
    assert refused(seal(SECRET, KIND, NAME, TOKENS, KV[:-1])) == "truncated"
    assert refused(b"") == "truncated"
    assert refused(b"something else altogether, of some length") == "foreign"


def test_a_value_that_was_copied_to_another_name_is_refused():
    """It has the tokens that are asked for, and its KV was computed behind another prefix."""
    assert refused(seal(SECRET, KIND, NAME, TOKENS, KV), name="cd" * 16) == "corrupted"
