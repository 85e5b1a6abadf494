"""A search in the engine: one group of sequences, charged for every token, whatever happens around it."""

import random

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request

from cache.blocks.usage import SHARED
from workers.engine.sequences.sequence import Status
from workers.protocol.messages import BeamParams, Cancel, ExtendLease, Failed, SamplingParams

WIDTH, STEPS = 3, 9


def driver(num_blocks=64, **options):
    return Driver(ScriptedRunner(num_blocks=num_blocks, block_size=4), **options)


def search(name="s", prompt=(97, 98, 99, 100, 101), width=WIDTH, steps=STEPS, **fields):
    fields.setdefault("sampling", SamplingParams(seed=0))
    return generate_request(name, prompt, steps, num_choices=width, beams=BeamParams(0.7), **fields)


def texts(drive, name="s", width=WIDTH):
    return [drive.tokens[LINK, name, index] for index in range(width)]


def alone(*args, **fields):
    drive = driver()
    drive.send(search(*args, **fields))
    drive.run().check_idle()
    return texts(drive, width=fields.get("width", WIDTH))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_search_beside_others_finds_what_it_finds_alone(lag):
    """Small steps, others that come, draw and end, somebody thrown out now and then; on a device that is late, too."""
    drive, source = (driver(num_blocks=40, lag=lag, max_batch_tokens=12, max_running=10), random.Random(1))
    others = [
        generate_request(
            f"r{i}",
            [source.randrange(97, 100) for _ in range(source.randrange(1, 14))],
            source.randrange(1, 14),
            temperature=1.0,
            seed=i,
        )
        for i in range(12)
    ]
    drive.send(search("a", (97,) * 9), *others[:6], search("b"), *others[6:])
    while not drive.idle:
        drive.step()
        running = drive.scheduler.running["interactive"]
        if running and source.random() < 0.2:
            drive.scheduler.ranks.preempt(source.choice(running), drive.now, "blocks")
    drive.check_idle()
    assert drive.engine.totals.num_recomputed > 0
    for request in others:
        drive.check_alone(request)
    assert texts(drive, "a") == alone(prompt=(97,) * 9)
    assert texts(drive, "b") == alone()


def test_every_token_of_every_beam_is_charged_and_told_on_the_way():
    drive = driver()
    drive.send(search())
    drive.run()
    spent = [delta.num_spent for delta in drive.records if not delta.tokens]
    assert spent == [WIDTH * step for step in range(1, STEPS + 1)]
    assert drive.endings[LINK, "s"].usage.output == WIDTH * STEPS
    assert drive.prompt_counts[LINK, "s"].uncached + drive.prompt_counts[LINK, "s"].cache_write == 5


def test_all_beams_run_in_a_step_or_none_does():
    """The lease allows two steps and a part of the third; the rest of the search waits for a word."""
    drive = driver()
    drive.send(search(lease_bound=2 * WIDTH + 1))
    for _ in range(5):
        drive.step()
    assert drive.attempt("s").lease.spent == 2 * WIDTH
    assert [len(row.tokens) for row in drive.runner.steps[-1]] == [1] * WIDTH
    assert all(s.status is Status.RUNNING for s in drive.attempt("s").sequences)
    drive.send(ExtendLease("s", 1, WIDTH * STEPS))
    drive.run().check_idle()
    assert texts(drive) == alone()


def test_parked_too_long_it_gives_up_all_blocks_and_comes_back_whole():
    drive = driver(lease_wait_s=1.0)
    drive.send(search(lease_bound=2 * WIDTH))
    for _ in range(5):
        drive.step()
    drive.step(after_s=2.0)
    assert [s.status for s in drive.attempt("s").sequences] == [Status.SUSPENDED] * WIDTH
    drive.send(ExtendLease("s", 1, WIDTH * STEPS))
    drive.run().check_idle()
    assert texts(drive) == alone()


def test_at_the_end_of_the_budget_the_beams_count_as_they_are():
    drive = driver()
    drive.send(search(lease_bound=3 * WIDTH + 2))
    for _ in range(5):
        drive.step()
    drive.send(ExtendLease("s", 1, 3 * WIDTH + 2, last=True))
    drive.run().check_idle()
    assert drive.endings[LINK, "s"].reason == "budget"
    assert drive.endings[LINK, "s"].usage.output == 3 * WIDTH
    assert [len(text) for text in texts(drive)] == [3] * WIDTH
    assert set(drive.finishes.values()) == {"budget"}


def test_a_budget_below_one_step_ends_it_without_a_token():
    drive = driver()
    drive.send(search(lease_bound=WIDTH - 1))
    drive.step()
    drive.send(ExtendLease("s", 1, WIDTH - 1, last=True))
    drive.run().check_idle()
    assert texts(drive) == [[]] * WIDTH
    assert drive.endings[LINK, "s"].usage.output == 0


@pytest.mark.parametrize("after", range(1, 6))
def test_cancelled_at_any_step_it_leaves_nothing(after):
    drive = driver()
    drive.send(search())
    for _ in range(after):
        drive.step()
    drive.send(Cancel("s", 1))
    drive.step()
    assert not drive.finishes, "one beam cannot be cancelled"
    drive.send(Cancel("s"))
    drive.run().check_idle()
    assert set(drive.finishes.values()) == {"cancelled"}


def test_a_batch_search_goes_as_one_for_interactive_work():
    drive = driver(max_running=8)
    drive.send(search(tier="batch", steps=30, prompt=(97,) * 30))
    for _ in range(4):
        drive.step()
    drive.send(*[generate_request(f"r{i}", (98 + i,) * 20, 4) for i in range(6)])
    for _ in range(3):
        drive.step()
        held = [s for s in drive.attempt("s").sequences if s.handle is not None]
        assert len(held) in (0, WIDTH)
    assert drive.engine.totals.num_preempted >= WIDTH
    drive.run().check_idle()
    assert texts(drive) == alone(steps=30, prompt=(97,) * 30)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"width": 9, "steps": 20}, "too_long"),  # 9 x 7 blocks of 51
        ({"width": 90, "steps": 1}, "too_long"),
        ({"grammar": 'start: "a"'}, "internal"),
        ({"resume": ((0, (97,)),)}, "internal"),
        ({"steps": 0}, "internal"),
    ],
)
def test_a_search_that_cannot_be_is_refused(fields, code):
    drive = driver()
    drive.send(search(**fields))
    drive.run().check_idle()
    ending = drive.endings[LINK, "s"]
    assert isinstance(ending, Failed)
    assert ending.code == code


@pytest.mark.parametrize(("width", "taken"), [(2, True), (8, False)])
def test_the_logprobs_of_all_texts_of_a_search_fit_half_a_frame(width, taken):
    """They come in one step. Each text has 1,600 * 51 logprobs of 32 bytes, and half a frame is 8 MiB."""
    drive = driver(num_blocks=5000)
    drive.send(search(width=width, steps=1600, sampling=SamplingParams(seed=0, logprobs=50)))
    drive.step()
    if taken:
        assert not drive.endings
    else:
        ending = drive.endings[LINK, "s"]
        assert (ending.code, ending.message) == ("too_long", "logprobs of so many and long texts do not fit a frame")


def test_a_search_that_fills_the_pool_alone_comes_to_its_end():
    """As large as the door lets in, thrown out at every second step."""
    drive = driver(num_blocks=40)
    drive.send(search(width=4, steps=23))
    for step in range(400):
        if drive.idle:
            break
        drive.step()
        running = drive.scheduler.running["interactive"]
        if running and step % 2:
            drive.scheduler.ranks.preempt(running[-1], drive.now, "blocks")
            drive.cache.free(drive.cache.allocate(drive.cache.available(SHARED)))
    drive.run()
    drive.check_idle()
    assert drive.endings[LINK, "s"].reason == "length"
    assert texts(drive, width=4) == alone(width=4, steps=23)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_searches_that_fight_for_blocks_all_come_to_their_ends(seed, lag):
    """Leases grow a little at a time, so that admission sees little of what is to come; pool and steps are small."""
    source = random.Random(seed)
    drive = driver(num_blocks=44, lag=lag, max_batch_tokens=16, max_running=14)
    requests = [
        search(
            f"s{i}",
            tuple(source.choices(range(97, 100), k=source.randrange(1, 12))),
            width=source.randrange(1, 5),
            steps=source.randrange(4, 18),
            lease_bound=4,
            tier=source.choice(["interactive", "interactive", "batch"]),
            tenant=source.choice("ab"),
            cache_write=source.random() < 0.7,
        )
        for i in range(8)
    ]
    pending = list(requests)
    for number in range(1, 3000):
        if pending and source.random() < 0.5:
            drive.send(pending.pop())
        elif drive.idle and not pending:
            break
        for attempt in drive.engine.attempts.values():
            lease = attempt.lease
            if lease.left < attempt.lease.stride:
                name = attempt.message.request_id
                drive.send(ExtendLease(name, number, lease.bound + source.randrange(1, 9)))
        drive.step()
    drive.check_idle()
    for request in requests:
        width, steps = request.num_choices, request.max_tokens
        assert texts(drive, request.request_id, width) == alone(prompt=request.prompt, width=width, steps=steps)


def test_searches_that_fight_do_lose_blocks():
    """The schedules above are not all easy ones."""
    drive = driver(num_blocks=44, max_batch_tokens=16, max_running=14)
    for i in range(3):
        drive.send(search(f"s{i}", (97 + i,) * 10, width=4, steps=17, lease_bound=4))
    for number in range(1, 300):
        if drive.idle and number > 1:
            break
        drive.step()
        for i in range(3):
            drive.send(ExtendLease(f"s{i}", number, 4 + number * 4))
    drive.run().check_idle()
    assert drive.engine.totals.num_preempted > 0
