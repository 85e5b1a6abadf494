"""Requests with a LoRA adapter: which rows take it, who may not share KV with whom, and what is refused."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedAdapter, encode, generate_request

from workers.engine.lora.adapter_table import AdapterRead
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import LoadedAdapter
from workers.protocol.messages import AdapterCommand, CacheCommand, Failed

LONG = encode("a prompt that is long enough to fill several blocks of four")


@pytest.fixture
def drive():
    driver = Driver()
    driver.runner.adapters = {"poet": LoadedAdapter(1, b"i" * 16), "clerk": LoadedAdapter(2, b"c" * 16)}
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


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [("poet", "", False), ("", "poet", False), ("poet", "clerk", False), ("poet", "poet", True)],
)
def test_kv_is_found_under_the_same_adapter_only(drive, first, second, shared):
    for name, adapter in (("one", first), ("two", second)):
        drive.send(generate_request(name, LONG, 4, adapter=adapter))
        drive.run().check_idle()
    assert drive.endings[LINK, "one"].usage.cache_write == len(LONG) // 4 * 4
    assert bool(drive.endings[LINK, "two"].usage.cache_read) is shared


def test_equal_weights_share_kv_whatever_they_are_called(drive):
    drive.runner.adapters["namesake"] = LoadedAdapter(3, b"i" * 16)
    for name, adapter in (("one", "poet"), ("two", "namesake")):
        drive.send(generate_request(name, LONG, 4, adapter=adapter))
        drive.run().check_idle()
    assert drive.endings[LINK, "two"].usage.cache_read > 0


def test_a_tenant_is_purged_with_what_adapters_have_of_it(drive):
    drive.send(generate_request("one", LONG, 4, adapter="poet"))
    drive.run()
    drive.send(CacheCommand("drop", tenant="tenant"))
    drive.run()
    drive.step()
    drive.send(generate_request("two", LONG, 4, adapter="poet"))
    drive.run().check_idle()
    assert drive.endings[LINK, "two"].usage.cache_read == 0


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
    assert ending.code == "wrong_root"
    assert "no adapter 'painter'" in ending.message


def read(name="late", identity=b"l" * 16):
    return AdapterRead(name, ScriptedAdapter(identity))


def states(drive):
    told = [output.adapters for output in drive.outputs if output.adapters is not None]
    return {one.name: one for one in told[-1]}


def test_an_adapter_comes_while_others_run_and_is_told_of(drive):
    drive.send(generate_request("r", LONG, 30))
    drive.step()
    drive.send(read())
    drive.step()
    assert states(drive)["late"].state == "loaded"
    drive.send(generate_request("s", LONG, 4, adapter="late"))
    drive.run().check_idle()
    assert drive.endings[LINK, "s"].usage.output == 4


def test_what_cannot_be_read_is_told_and_the_worker_goes_on(drive):
    drive.send(AdapterRead("late", ModelError("no such file")))
    drive.step()
    assert (states(drive)["late"].state, states(drive)["late"].reason) == ("failed", "no such file")
    drive.send(generate_request("r", LONG, 4))
    drive.run().check_idle()
    drive.send(read())
    drive.step()
    assert states(drive)["late"].state == "loaded"


def test_who_runs_with_an_adapter_ends_before_it_leaves_and_nobody_new_begins(drive):
    drive.send(read())
    drive.send(generate_request("r", LONG, 20, adapter="late"))
    for _ in range(3):
        drive.step()
    drive.send(AdapterCommand("unload", "late"))
    drive.step()
    assert states(drive)["late"].state == "unloading"
    assert "late" in drive.runner.adapters
    drive.send(generate_request("s", LONG, 4, adapter="late"))
    drive.step()
    assert isinstance(drive.endings[LINK, "s"], Failed)
    drive.run()
    assert drive.endings[LINK, "r"].usage.output == 20
    drive.step()
    assert "late" not in states(drive)
    assert "late" not in drive.runner.adapters


def test_commands_said_twice_do_nothing_twice(drive):
    drive.send(read(), read(identity=b"x" * 16))
    drive.step()
    assert states(drive)["late"].identity == b"l" * 16
    for _ in range(2):
        drive.send(AdapterCommand("unload", "late"), AdapterCommand("unload", "nobody"))
        drive.step()
    assert set(states(drive)) == set()
    assert "late" not in drive.runner.adapters
