"""What sharing saves, and how full blocks are."""

from engine_driver import Driver
from fakes import ScriptedRunner, generate_request

from workers.engine.metrics import Metrics
from workers.engine.reports.occupancy import occupancy
from workers.protocol.messages import BeamParams


def driver(**options):
    return Driver(ScriptedRunner(num_blocks=64, block_size=4), **options)


def look(drive):
    return occupancy(drive.scheduler.all_running, drive.cache.block_size, drive.scheduler.layout.num_dropped)


def test_choices_hold_their_prompt_once():
    drive = driver()
    drive.send(generate_request("n", (97,) * 10, 20, num_choices=3, temperature=1.0, seed=11))
    for _ in range(4):  # the prompt, then 3 of the 4 tokens drawn are written: 13 in blocks of 4
        drive.step()
    found = look(drive)
    assert vars_of(found.shared["parallel"]) == (2 + 3 * 2, 3 * 4)
    assert found.shared["beam"].num_unshared == 0
    assert (found.num_slots, found.num_used) == (32, 8 + 3 * 5)


def vars_of(shared):
    return shared.num_held, shared.num_unshared


def test_one_choice_shares_nothing_and_a_prompt_in_prefill_has_empty_slots():
    drive = driver(max_batch_tokens=64)
    drive.send(generate_request("r", (97,) * 70, 2))
    drive.step()
    found = look(drive)
    assert [shared.num_unshared for shared in found.shared.values()] == [0, 0]
    assert (found.num_slots, found.num_used) == (72, 64)


def test_a_tail_that_beams_share_counts_once():
    drive = driver()
    drive.send(generate_request("s", (97,) * 10, 20, num_choices=3, beams=BeamParams()))
    drive.step()
    found = look(drive)
    assert vars_of(found.shared["beam"]) == (3, 9)
    assert (found.num_used, found.num_slots) == (10, 12)


def test_a_scrape_shows_them():
    drive, metrics = driver(), Metrics("m", 0, 4, 64)
    drive.send(generate_request("s", (97,) * 10, 20, num_choices=3, beams=BeamParams()))
    metrics.observe(drive.step(after_s=2.0))
    value = metrics.registry.get_sample_value
    assert value("headgate_sharing_blocks", {"mode": "beam", "kind": "unshared"}) == 9
    assert value("headgate_sharing_blocks", {"mode": "beam", "kind": "held"}) == 3
    assert value("headgate_kv_slots", {"kind": "used"}) == 10
