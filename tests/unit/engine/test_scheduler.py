import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request

from cache.blocks.usage import SHARED
from workers.engine.scheduling.step_plan import Limits
from workers.engine.sequences.sequence import Status
from workers.protocol.messages import ExtendLease


def driver(num_blocks=64, **options):
    return Driver(ScriptedRunner(num_blocks=num_blocks, block_size=4), **options)


def prompt(length, variant=0):
    return [97 + variant, *([98] * (length - 1))]


def running(drive, tier="interactive"):
    return [s.attempt.message.request_id for s in drive.scheduler.running[tier]]


def chunks(drive):
    """(tokens of each row) of the last step."""
    return [len(row.tokens) for row in drive.runner.steps[-1]]


def test_decodes_come_first_and_prefills_share_what_is_left():
    drive = driver(max_batch_tokens=21, max_running=8)
    drive.send(generate_request("old", prompt(5), 20))
    drive.step()
    drive.send(*[generate_request(f"r{i}", prompt(40, i), 20) for i in range(1, 3)])
    drive.step()
    assert chunks(drive) == [1, 10, 10]


def test_a_short_prompt_leaves_its_share_to_the_long_ones():
    drive = driver(max_batch_tokens=24, max_running=8)
    drive.send(generate_request("long", prompt(60, 1), 2), generate_request("short", prompt(6, 2), 2))
    drive.step()
    assert sorted(chunks(drive)) == [6, 18]
    assert drive.tokens[LINK, "short", 0], "the short one was stuck behind the long one"


def test_inside_a_tenant_the_first_to_come_is_the_first_to_run():
    drive = driver(max_running=2)
    drive.send(*[generate_request(f"r{i}", prompt(5, i), 3) for i in range(5)])
    order = []
    while drive.inbox or drive.engine.attempts:
        drive.step()
        order += [name for name in running(drive) if name not in order]
    assert order == [f"r{i}" for i in range(5)]


def test_across_tenants_the_one_that_got_least_is_next():
    drive = driver(max_running=1)
    drive.send(*[generate_request(f"a{i}", prompt(20, i), 9, tenant="a") for i in range(4)])
    drive.step()
    drive.send(generate_request("b0", prompt(5, 9), 3, tenant="b"))
    order = []
    while drive.inbox or drive.engine.attempts:
        drive.step()
        order += [name for name in running(drive) if name not in order]
    assert order.index("b0") == 1


def test_interactive_is_admitted_before_batch_that_came_earlier():
    drive = driver(max_running=1)
    drive.send(
        generate_request("first", prompt(5), 4),
        generate_request("batch", prompt(5, 1), 4, tier="batch"),
        generate_request("chat", prompt(5, 2), 4),
    )
    drive.run()
    ended = [a.message.request_id for output in drive.outputs for a in output.ended]
    assert ended == ["first", "chat", "batch"]


def test_batch_gives_its_place_to_interactive_and_keeps_its_blocks_in_the_tree():
    drive = driver(max_running=1)
    drive.send(generate_request("batch", prompt(17), 30, tier="batch"))
    for _ in range(3):
        drive.step()
    drive.send(generate_request("chat", prompt(9, 1), 3))
    drive.step()
    assert running(drive, "batch") == []
    drive.run().check_idle()
    usage = drive.endings[LINK, "batch"].usage
    assert 0 < usage.recomputed < 4
    assert usage.output == 30


def test_a_step_that_preempted_admits_nobody():
    drive = driver(max_running=2)
    drive.send(generate_request("batch", prompt(9), 30, tier="batch"))
    drive.step()
    drive.send(*[generate_request(f"chat{i}", prompt(9, 1 + i), 30) for i in range(2)])
    drive.step()
    assert running(drive) == ["chat0"]
    assert running(drive, "batch") == []
    drive.step()
    assert running(drive) == ["chat0", "chat1"]


def test_a_step_that_preempted_for_a_running_sequence_admits_nobody_either():
    drive = driver(num_blocks=40, max_batch_tokens=200)
    drive.send(generate_request("chat", prompt(19), 40, lease_bound=8))
    drive.send(generate_request("batch", prompt(30, 1), 20, tier="batch"))
    drive.step()
    drive.step()
    assert running(drive, "batch") == ["batch"]
    chat = drive.attempt("chat").sequences[0]
    assert chat.num_computed == 4 * len(chat.block_ids), "the next token needs a block"
    taken = drive.cache.allocate(drive.cache.available(SHARED))
    drive.send(generate_request("small", prompt(4, 2), 2))
    drive.step()
    assert (running(drive), running(drive, "batch")) == (["chat"], [])
    drive.step()
    assert running(drive) == ["chat", "small"]
    drive.cache.free(taken)
    drive.send(ExtendLease("chat", 1, 40))
    drive.run().check_idle()


def decoding_without_room(num_blocks=21):
    """Two interactive sequences that fill the pool, so that the next block costs the later one its own."""
    drive = driver(num_blocks=num_blocks, max_batch_tokens=200)
    drive.send(*[generate_request(f"r{i}", prompt(20, i), 40, lease_bound=8) for i in range(2)])
    drive.step()
    assert running(drive) == ["r0", "r1"]
    drive.send(*[ExtendLease(f"r{i}", 1, 40) for i in range(2)])
    while drive.engine.totals.num_preempted == 0:
        drive.step()
    return drive


def test_the_later_of_two_is_preempted_and_nobody_is_admitted_before_it_is_back():
    drive = decoding_without_room()
    assert running(drive) == ["r0"]
    assert drive.attempt("r1").sequences[0].status is Status.PREEMPTED
    drive.send(generate_request("late", prompt(4, 5), 2))
    ended = []
    while drive.inbox or drive.engine.attempts:
        output = drive.step()
        ended += [a.message.request_id for a in output.ended]
        if "late" in running(drive):
            assert drive.attempt("r1").sequences[0].status is Status.RUNNING or "r1" in ended
    drive.check_idle()


def test_a_preempted_sequence_comes_back_only_with_twice_the_watermark():
    drive = decoding_without_room()
    sequence = drive.attempt("r1").sequences[0]
    again = drive.scheduler.admission._spare_blocks(sequence, 1)
    sequence.status = Status.WAITING
    once = drive.scheduler.admission._spare_blocks(sequence, 1)
    sequence.status = Status.PREEMPTED
    assert again - once == 2  # the watermark of a pool this small: a block per running sequence


@pytest.mark.parametrize(("length", "admitted"), [(60, True), (61, False)])
def test_admission_wants_the_whole_prompt_the_first_lease_and_the_watermark(length, admitted):
    """Of 29 blocks `a` holds 10, though it has computed 2; the lease of 8 takes 2 more, two sequences' watermark 2."""
    drive = driver(num_blocks=30, max_batch_tokens=8, max_running=4)
    drive.send(generate_request("a", prompt(40), 20, lease_bound=20))
    drive.step()
    drive.send(generate_request("b", prompt(length, 1), 8, lease_bound=8))
    drive.step()
    assert running(drive) == ["a", "b"][: 1 + admitted]
    drive.run().check_idle()


def test_choices_take_a_place_each_before_they_exist():
    drive = driver(max_running=4)
    drive.send(generate_request("three", prompt(9), 5, num_choices=3))
    drive.send(generate_request("two", prompt(9, 1), 5, num_choices=2))
    drive.step()
    assert running(drive) == ["three"] * 3
    drive.run().check_idle()


def test_a_step_too_small_for_its_sequences_is_refused():
    with pytest.raises(ValueError, match="max_batch_tokens"):
        Limits(max_batch_tokens=8, max_running=9, max_len=100)


def test_waiting_tokens_are_those_of_prompts_that_never_ran():
    drive = driver(max_running=1)
    drive.send(*[generate_request(f"r{i}", prompt(9, i), 5) for i in range(3)])
    output = drive.step()
    assert (output.status.running, output.status.waiting, output.status.waiting_tokens) == (1, 2, 18)
    drive.run().check_idle()


def sacrificed(*, spared=()):
    """Who goes when the second of four wants a block: tenants a, a, b, a; b was given most."""
    drive = driver(num_blocks=200)
    for i, tenant in enumerate("aaba"):
        drive.send(generate_request(f"r{i}", prompt(9, i), 40, tenant=tenant))
    drive.step()
    drive.scheduler.counters.charge("b", computed=1000)
    sequences = drive.scheduler.running["interactive"]
    for index in spared:
        sequences[index].num_preempted = 2
    return drive.scheduler.growth._victim(sequences[1]).attempt.message.request_id


def test_the_tenant_that_got_most_loses_its_blocks_and_nobody_a_third_time():
    assert sacrificed() == "r2"
    assert sacrificed(spared=[2]) == "r3"
    assert sacrificed(spared=[2, 3]) == "r1"
    assert sacrificed(spared=[1, 2, 3]) == "r3"
