from __future__ import annotations

import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.access import credentials

PEPPER = b"p" * 32


@pytest.mark.parametrize("kind", ["live", "test", "admin"])
def test_a_generated_key_has_the_documented_form_and_parses(kind):
    value = credentials.generate(kind)
    assert re.fullmatch(rf"hg_{kind}_[0-9A-Za-z]{{10}}_[0-9A-Za-z]{{43}}_[0-9A-Za-z]{{6}}", value)
    parsed = credentials.parse(value)
    assert (parsed.kind, parsed.public_id) == (kind, value.split("_")[2])


def test_the_checksum_is_crc32_of_what_stands_before_it():
    body, _, checksum = credentials.generate("live").rpartition("_")
    number = 0
    for digit in checksum:
        number = number * 62 + credentials.BASE62.index(digit)
    assert number == zlib.crc32(body.encode())


def test_keys_do_not_repeat():
    assert len({credentials.generate("live") for _ in range(100)}) == 100


@given(st.data())
def test_one_wrong_character_anywhere_is_noticed(data):
    value = credentials.generate("live")
    place = data.draw(st.integers(0, len(value) - 1))
    other = data.draw(st.sampled_from(sorted(set(credentials.BASE62) - {value[place]})))
    assert credentials.parse(value[:place] + other + value[place + 1 :]) is None


@given(st.text())
def test_what_is_not_a_key_is_none_and_raises_nothing(text):
    assert credentials.parse(text) is None
    assert credentials.parse("hg_live_" + text) is None
    assert credentials.parse_batch(PEPPER, text) is None
    assert credentials.parse_batch(PEPPER, "hg_batch_" + text) is None


def test_the_hash_depends_on_the_pepper_and_a_miss_never_verifies():
    value = credentials.generate("live")
    stored = credentials.keyed_hash(PEPPER, value)
    assert credentials.verify(PEPPER, value, stored)
    assert not credentials.verify(b"q" * 32, value, stored)
    assert not credentials.verify(PEPPER, value, None)


def test_a_batch_credential_names_its_batch_and_only_the_pepper_can_make_it():
    value = credentials.batch_credential(PEPPER, "batch_" + "0" * 32)
    assert value.startswith("hg_batch_" + "0" * 32 + "_")
    assert credentials.parse_batch(PEPPER, value) == "batch_" + "0" * 32
    assert credentials.parse_batch(b"q" * 32, value) is None
    assert credentials.parse_batch(PEPPER, value.replace("000_", "001_")) is None


def test_a_batchs_mac_is_no_keyed_hash_of_its_id():
    value = credentials.batch_credential(PEPPER, "batch_1")
    assert credentials.keyed_hash(PEPPER, "batch_1").hex() not in value
