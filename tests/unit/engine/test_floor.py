import pytest
from engine_driver import LINK, Driver
from fakes import VECTOR_SIZE, ScriptedRunner, generate_request
from simulation import BlindRunner, paced_driver

from workers.engine.queueing.floor import SHARE, BatchFloor
from workers.engine.values.abilities import Abilities
from workers.protocol.messages import BeamParams, Cancel, PoolingParams, SamplingParams


def test_batch_is_below_its_floor_only_with_less_than_its_share_of_both_counts():
    floor = BatchFloor(64)
    assert not floor.due, "nothing ran: nothing is owed"
    for step in range(100):
        floor.count(step * 0.01, (0, 0), (100, 10))
    assert floor.due
    floor.count(1.0, (0, 60), (0, 0))
    assert not floor.due
    for step in range(2000):
        floor.count(1.0 + step * 0.01, (50, 0), (100, 10))
    assert not floor.due


def test_a_batch_prompt_gets_its_share_beside_interactive_work_that_never_ends():
    drive = Driver(ScriptedRunner(num_blocks=400, block_size=4), max_batch_tokens=40, max_running=16)
    drive.send(generate_request("job", [5] * 200, 4, tier="batch"))
    number = num_batch = num_all = 0
    while (LINK, "job") not in drive.endings:
        while drive.scheduler.num_waiting < 3:
            number += 1
            drive.send(generate_request(f"chat{number}", [number % 250, *[7] * 60], 2))
            if len(drive.inbox) > 3:
                break
        drive.step()
        for row in drive.runner.steps[-1]:
            num_all += len(row.tokens)
            num_batch += len(row.tokens) * (row.tokens[0] == 5 and len(row.tokens) < 61)
        assert number < 2000, "batch was kept out"
    assert num_batch >= 0.7 * SHARE * num_all


def test_the_share_is_saved_for_an_input_that_is_computed_in_one_step():
    floor = BatchFloor(64)
    assert [floor.reserve(100, 7) for _ in range(6)] == [0, 0, 7, 0, 0, 7]
    assert [floor.reserve(100, 1000) for _ in range(334)][-1] == 100, "the whole step"
    assert floor.reserve(100) == floor.reserve(100, 2) == 3


def test_beams_come_to_the_floor_of_batch_beside_interactive_work_that_never_ends():
    """They draw together, and there are more of them than tokens in the share of a step, which is one."""
    drive = Driver(ScriptedRunner(num_blocks=400, block_size=4), max_batch_tokens=40, max_running=16)
    search = {"num_choices": 3, "beams": BeamParams(0.7), "sampling": SamplingParams(seed=0)}
    drive.send(generate_request("beams", [5] * 4, 6, tier="batch", tenant="b", **search))
    drive.send(generate_request("stream", [6] * 4, 6, tier="batch", tenant="s"))
    drive.step()
    drive.step()
    number = 0
    while not {(LINK, "beams"), (LINK, "stream")} <= drive.endings.keys():
        while drive.scheduler.num_waiting < 3 and len(drive.inbox) <= 3:
            number += 1
            drive.send(generate_request(f"chat{number}", [number % 250, *[7] * 60], 2))
        drive.step()
        assert number < 2000, "batch was kept out"


@pytest.mark.parametrize("num_batch", [5, 100])
@pytest.mark.parametrize("is_whole", [True, False])
def test_batch_inputs_are_computed_beside_a_trickle_of_interactive_ones(num_batch, is_whole):
    """A step in which nothing interactive is computed never comes."""
    abilities = Abilities(tasks=("embed",), vector_size=VECTOR_SIZE, is_whole=is_whole, reuses_kv=not is_whole)
    runner = ScriptedRunner(num_blocks=400, block_size=4, abilities=abilities)
    drive = Driver(runner, max_batch_tokens=64, max_running=16)
    num_chats, jobs = 0, range(min(3, int(SHARE * 4000) // num_batch))

    def send(name, length, tier):
        tokens = [num_chats % 250, num_chats // 250, *[7] * (length - 2)]
        pooling = PoolingParams("embed", (length,))
        drive.send(generate_request(name, tokens, 0, pooling=pooling, tier=tier, tenant=tier))

    while num_chats < 400:
        num_chats += 1
        send(f"chat{num_chats}", 10, "interactive")
        if num_chats == 20:
            for job in jobs:
                send(f"job{job}", num_batch, "batch")
        drive.step()
    assert all((LINK, f"job{job}") in drive.endings for job in jobs), "batch was kept out"
    assert sum((LINK, f"chat{number}") in drive.endings for number in range(1, 401)) >= 395


def crowd(jobs, num_chats, num_steps, until=(), **options):
    """Runs batch jobs (name, tenant, number of choices) beside chats of which `num_chats` are always there, for so many
    steps, or until the jobs named last have ended. Returns the driver."""
    runner = BlindRunner((0.005, 0.00001, 0.0), num_blocks=4000, block_size=16)
    drive = paced_driver(runner, **{"max_batch_tokens": 256, "max_running": 64} | options)
    drive._check_running = lambda: None
    number = 0
    for step in range(num_steps):
        while sum(key[1].startswith("chat") for key in drive.engine.attempts) + len(drive.inbox) < num_chats:
            number += 1
            tokens = [number % 250, number // 250, *[7] * 20]
            drive.send(generate_request(f"chat{number}", tokens, 100 + number % 100, tenant=f"a{number % 10}"))
        if step == 50:
            for name, tenant, num_choices in jobs:
                drive.send(generate_request(name, [5] * 40, 4, tenant=tenant, tier="batch", num_choices=num_choices))
        drive.step()
        if until and all((LINK, name) in drive.endings for name in until):
            break
    return drive


def test_batch_comes_to_its_floor_where_chats_fill_all_places():
    jobs = [f"job{i}" for i in range(5)]
    drive = crowd([(job, "batch", 1) for job in jobs], num_chats=70, num_steps=700, until=jobs)
    assert all((LINK, job) in drive.endings for job in jobs), "batch was kept out"


def test_a_wide_batch_request_without_places_does_not_keep_other_tenants_below_the_floor():
    jobs = [f"job{i}" for i in range(5)]
    drive = crowd([("wide", "wide", 32), *((job, "batch", 1) for job in jobs)], num_chats=50, num_steps=700)
    assert all((LINK, job) in drive.endings for job in jobs), "batch was kept out"
    assert (LINK, "wide") not in drive.endings


def test_batch_that_passes_a_wide_request_leaves_it_its_places():
    drive = crowd([("wide", "wide", 64), ("job", "batch", 1)], num_chats=50, num_steps=200)
    assert drive.scheduler.num_waiting == 2
    for key in [key for key in drive.engine.attempts if key[1].startswith("chat")]:
        drive.send(Cancel(key[1]))
    drive.step()
    drive.step()
    assert drive.scheduler.running["batch"][0].attempt.message.request_id == "wide"
