"""Requests with a LoRA adapter: which rows take it, who may not share KV with whom, and what is refused."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import encode, generate_request

from workers.protocol.messages import Failed

LONG = encode("a prompt that is long enough to fill several blocks of four")


@pytest.fixture
def drive():
    driver = Driver()
    driver.runner.adapters = {"poet": 1}
    return driver


def rows_of(drive):
    return [row for plan in drive.runner.steps for row in plan]


def test_every_row_of_a_request_takes_its_adapter(drive):
    drive.send(generate_request("r", LONG, 4, adapter="poet", num_choices=2))
    drive.run().check_idle()
    assert {row.adapter for row in rows_of(drive)} == {1}
    drive.runner.steps.clear()
    drive.send(generate_request("plain", LONG, 4))
    drive.run().check_idle()
    assert {row.adapter for row in rows_of(drive)} == {-1}


@pytest.mark.parametrize(("first", "second"), [("poet", ""), ("", "poet"), ("poet", "poet")])
def test_kv_made_with_an_adapter_is_never_found_and_finds_none(drive, first, second):
    for name, adapter in (("one", first), ("two", second)):
        drive.send(generate_request(name, LONG, 4, adapter=adapter))
        drive.run().check_idle()
    assert drive.endings[LINK, "two"].usage.cache_read == 0
    assert drive.endings[LINK, "one"].usage.cache_write == (0 if first else len(LONG) // 4 * 4)


def test_without_adapters_the_same_prompt_is_found(drive):
    for name in ("one", "two"):
        drive.send(generate_request(name, LONG, 4))
        drive.run().check_idle()
    assert drive.endings[LINK, "two"].usage.cache_read > 0


def test_an_adapter_that_the_worker_does_not_have_is_refused_with_its_name(drive):
    drive.send(generate_request("r", LONG, 4, adapter="painter"))
    drive.run().check_idle()
    ending = drive.endings[LINK, "r"]
    assert isinstance(ending, Failed)
    assert (ending.code, ending.retryable) == ("wrong_root", True)
    assert "no adapter 'painter'" in ending.message
