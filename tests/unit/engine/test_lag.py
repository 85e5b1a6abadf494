"""One step in flight while the next is planned. The device of these tests answers one step late and looks after its
rows and blocks itself (lagged_runner.py): a broken rule raises wherever it happens."""

import itertools
import queue
import time

import pytest
from engine_driver import EOS, LINK, Driver
from fakes import ScriptedRunner, encode, expected_output, generate_request
from lagged_runner import GARBAGE, LaggedRunner

from workers.engine import settings
from workers.engine.__main__ import build_engine
from workers.engine.engine import Drain, LinkClosed, Stop
from workers.engine.journal.journal import EngineJournal
from workers.engine.metrics import Metrics
from workers.engine.queueing.pace import RECOVERY_STEPS
from workers.engine.sequences.sequence import Status
from workers.engine.values.errors import DeviceOutOfMemory
from workers.engine.values.plan import PENDING
from workers.protocol.messages import Cancel, ExtendLease, SamplingParams

LONG = encode("the quick brown fox jumps over the lazy dog and then sleeps")


def driver(num_blocks=64, eos_every=0, lag=1, **options):
    runner = ScriptedRunner(num_blocks=num_blocks, block_size=4, eos_every=eos_every)
    made = Driver(runner, lag=lag, **options)
    made.eos_every = eos_every
    return made


def discarded(drive):
    return drive.engine.totals.num_lag_discarded


def outcome(drive):
    """All that a gateway hears of it, but for the order between requests."""
    endings = {
        key: (type(e).__name__, getattr(e, "reason", None) or e.code, e.usage) for key, e in drive.endings.items()
    }
    return dict(drive.tokens), drive.finishes, endings


# --- the pipeline ---


def test_a_step_is_launched_before_the_one_before_it_is_collected():
    drive = driver()
    drive.send(generate_request("r", LONG, 8))
    drive.step()
    assert (drive.engine.num_in_flight, drive.tokens) == (1, {})
    drive.step()
    assert drive.engine.num_in_flight == 1
    assert len(drive.tokens[LINK, "r", 0]) == 1
    assert list(drive.runner.inner.steps[0][0].tokens) == list(LONG)
    drive.run().check_idle()
    drive.check_alone(drive.requests[LINK, "r"])
    assert drive.runner.num_launched == 8
    assert drive.runner.num_late == 7
    assert discarded(drive) == 0


def test_rows_ahead_carry_the_pending_token_and_nothing_the_host_cannot_know():
    drive = driver()
    drive.send(generate_request("r", LONG, 4))
    drive.step()
    drive.step()
    (row,) = drive.runner._last.rows
    assert list(row.tokens) == [PENDING]
    assert row.start == len(LONG)
    (draw,) = row.draws
    assert (draw.position, list(draw.output)) == (len(LONG) + 1, [])
    drive.run().check_idle()


def test_a_runner_without_lag_and_a_setting_of_off_collect_in_the_same_round():
    for options in ({"lag": 0, "device": {}}, {"lag": 1, "allow_lag": False}):
        drive = driver(**options)
        drive.send(generate_request("r", LONG, 8))
        for num_tokens in range(1, 9):
            drive.step()
            assert drive.engine.num_in_flight == 0
            assert len(drive.tokens[LINK, "r", 0]) == num_tokens
        drive.check_idle()
        assert drive.runner.num_late == 0


@pytest.mark.parametrize("fields", [{"num_choices": 3}, {"prompt_logprobs": 0}])
def test_forks_and_prompt_logprobs_are_collected_before_the_next_plan(fields):
    """The device refuses to be given a step behind one of these."""
    drive = driver()
    request = generate_request("r", LONG, 6, temperature=1.0, **fields)
    drive.send(generate_request("other", LONG[3:], 30), request)
    drive.run().check_idle()
    for index in range(request.num_choices):
        drive.check_alone(request, index=index)
    assert drive.runner.num_late > 20


def test_the_loop_of_the_engine_thread_never_waits_while_somebody_could_run(monkeypatch):
    """Nor in a round that plans nothing, because the first one's last token is pending, and collects it."""
    drive = driver(max_running=1)
    drive.engine._clock = time.monotonic
    monkeypatch.setattr("workers.engine.engine.POLL_S", 3600)
    inbox = queue.SimpleQueue()
    outputs = []

    def deliver(output):
        outputs.append(output)
        if sum(len(output.ended) for output in outputs) == 2:
            assert drive.engine.num_in_flight == 0
            inbox.put((0, Stop()))

    for name in ("r", "next"):
        inbox.put((LINK, generate_request(name, LONG, 40)))
    drive.engine.run(inbox, deliver)
    assert sum(len(output.steps) for output in outputs) == 80
    assert drive.runner.num_late == 78


@pytest.mark.parametrize(("setting", "used"), [("auto", 1), ("off", 0)])
def test_the_setting_decides_whether_a_worker_uses_what_its_runner_offers(monkeypatch, tmp_path, setting, used):
    monkeypatch.setenv("HEADGATE_MODEL", "/models/demo")
    monkeypatch.setenv("HEADGATE_ENGINE_LAG", setting)
    runner = LaggedRunner(ScriptedRunner(num_blocks=64, block_size=4), 256)
    journal = EngineJournal(tmp_path, "worker-0", "process", runner.root)
    engine = build_engine(settings.load(), runner, journal)
    engine.step([(LINK, generate_request("r", LONG, 8))])
    assert engine.num_in_flight == used
    journal.close()


def test_a_plan_without_work_collects_what_is_in_flight():
    drive = driver()
    drive.send(generate_request("r", LONG, 20, lease_bound=3))
    for _ in range(4):
        drive.step()
    assert drive.engine.num_in_flight == 0
    assert len(drive.tokens[LINK, "r", 0]) == 3
    drive.step()
    assert drive.attempt("r").lease.parked_at is not None
    drive.send(ExtendLease("r", 1, 20))
    drive.run().check_idle()
    drive.check_alone(drive.requests[LINK, "r"])


# --- ends ---


def test_an_end_token_shows_one_step_late_and_the_row_behind_it_is_dropped():
    drive = driver(eos_every=5)
    request = generate_request("r", LONG, 200)
    drive.send(request)
    drive.run().check_idle()
    drive.check_alone(request)
    assert drive.tokens[LINK, "r", 0][-1] == EOS
    usage = drive.endings[LINK, "r"].usage
    assert usage.output == len(drive.tokens[LINK, "r", 0])
    assert discarded(drive) == 1
    assert sum(r.num_lag_discarded for o in drive.outputs for r in o.steps) == 1


def test_what_is_dropped_is_not_charged_to_the_tenant():
    charged = []
    for lag in (0, 1):
        drive = driver(eos_every=5, lag=lag)
        charges = []
        charge = drive.scheduler.counters.charge

        def watched(tenant, charges=charges, charge=charge, **parts):
            charges.append(tuple(sorted(parts.items())))
            charge(tenant, **parts)

        drive.scheduler.counters.charge = watched
        drive.send(*[generate_request(f"r{i}", LONG[i:], 200, seed=i) for i in range(4)])
        drive.run().check_idle()
        assert discarded(drive) == 4 * lag
        charged.append({kind: sum(dict(c).get(kind, 0) for c in charges) for kind in ("computed", "output")})
    assert charged[0] == charged[1]


@pytest.mark.parametrize("bound", ["max_tokens", "lease", "context", "last lease"])
def test_a_bound_known_ahead_costs_no_discarded_token(bound):
    drive = driver(num_blocks=16 if bound == "context" else 64)
    max_len = drive.scheduler.limits.max_len
    num_tokens = {"max_tokens": 7, "context": max_len - 9}.get(bound, 5)
    fields = {"lease_bound": 5} if "lease" in bound else {"lease_bound": 999}
    drive.send(generate_request("r", LONG[:9], 7 if bound == "max_tokens" else 200, **fields))
    if bound == "last lease":
        drive.send(ExtendLease("r", 1, 5, last=True))
    for _ in range(num_tokens + 3):
        drive.step()
    assert len(drive.tokens[LINK, "r", 0]) == num_tokens
    assert (LINK, "r") in drive.endings or bound == "lease"
    drive.send(Cancel("r"))
    drive.run().check_idle()
    assert discarded(drive) == 0
    assert drive.runner.num_tokens == 9 + num_tokens - 1


@pytest.mark.parametrize("bound", range(3, 16))
def test_a_last_lease_of_several_choices_is_dealt_out_as_without_lag(bound):
    """Some end early, at a token that shows one step late: who gets the last tokens must not depend on it."""
    for seed in range(6):
        heard = []
        for lag in (0, 1):
            drive = driver(eos_every=4, lag=lag)
            drive.send(
                generate_request("r", LONG, 9, num_choices=3, temperature=1.0, seed=seed, lease_bound=bound),
                ExtendLease("r", 1, bound, last=True),
            )
            drive.run().check_idle()
            heard.append(outcome(drive))
        assert heard[0] == heard[1]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_cancel_in_every_phase_is_silent_about_what_is_in_flight(num_choices):
    for at in range(24):
        drive = driver(max_batch_tokens=16, max_running=8)
        other = generate_request("other", LONG[7:], 30)
        request = generate_request("r", LONG, 9, num_choices=num_choices, temperature=1.0)
        drive.send(request, other)
        for _ in range(at):
            drive.step()
        if at and (LINK, "r") in drive.endings:
            break
        drive.send(Cancel("r"))
        heard = drive.step()
        assert [a.message.request_id for a in heard.ended] == ["r"]
        num_heard = sum(map(len, drive.tokens.values()))
        assert drive.endings[LINK, "r"].usage.output == num_heard - len(drive.tokens[LINK, "other", 0])
        drive.run().check_idle()
        for index in range(num_choices):
            drive.check_alone(request, index=index, exactly=False)
        drive.check_alone(other)
    else:
        pytest.fail("the request never ended by itself")


@pytest.mark.parametrize("how", ["cancel", "link", "drain", "preempt", "silence"])
@pytest.mark.parametrize("at", [1, 2, 5, 9, 12])
def test_blocks_in_flight_come_back_only_when_the_step_is_collected(how, at):
    """Every way out x prefill, first token, decode, parked. Someone else wants blocks at once."""
    drive = driver(num_blocks=36, max_batch_tokens=16, max_running=8)
    request = generate_request("r", LONG, 9, lease_bound=7)
    drive.send(request, link=2)
    for _ in range(at):
        drive.step()
    (sequence,) = drive.engine.attempts[2, "r"].sequences
    in_flight = sequence.last_step > drive.scheduler.block_tables._collected
    held, row_id = set(sequence.block_ids), sequence.row_id
    assert in_flight == (at < 12)
    events = {"cancel": Cancel("r"), "link": LinkClosed(), "drain": Drain(now=True)}
    if how == "preempt":
        drive.scheduler.ranks.preempt(sequence, drive.now, "blocks")
    elif how in events:
        drive.engine._drain_inbox([(2, events[how])], drive.now)
    else:
        drive.now += 16
        drive.engine._attempts.expire(drive.now)
    if sequence.status is not Status.RUNNING:
        assert set(sequence.block_ids) == (held if in_flight else set())
        assert sequence.row_id == (row_id if in_flight else -1)
        free = set(drive.cache.owners.pool.free_ids())
        assert not in_flight or not held & free
    if how != "drain":
        drive.send(generate_request("next", LONG[5:], 6))
    drive.step()
    assert in_flight is False or sequence.row_id == -1 or sequence.status is Status.RUNNING
    drive.send(Cancel("r"), ExtendLease("r", 1, 9), link=2)
    drive.run().check_idle()
    if how != "drain":
        drive.check_alone(drive.requests[LINK, "next"])


def test_a_row_is_not_given_to_another_while_a_launched_step_has_it():
    drive = driver(max_running=1, eos_every=5)
    drive.send(*[generate_request(f"r{i}", LONG[i:], 100, seed=i) for i in range(4)])
    drive.run().check_idle()
    for i in range(4):
        drive.check_alone(drive.requests[LINK, f"r{i}"])
    assert discarded(drive) == 4


def test_a_preempted_sequence_keeps_what_is_in_flight():
    drive = driver(max_batch_tokens=200)
    request = generate_request("r", LONG, 12, num_choices=2)
    drive.send(request)
    for _ in range(200):
        if drive.idle:
            break
        drive.step()
        for sequence in tuple(drive.scheduler.running["interactive"]):
            drive.scheduler.ranks.preempt(sequence, drive.now, "blocks")
    drive.check_idle()
    for index in range(2):
        drive.check_alone(request, index=index)
    assert discarded(drive) == 0


# --- lag on is lag off ---


WORKLOADS = {
    "plain": {},
    "stops": {"eos_every": 7},
    "chunks": {"max_batch_tokens": 9, "max_running": 4},
    "tiny pool": {"num_blocks": 32, "eos_every": 17},
    "few rows": {"max_running": 3},
}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("num_choices", [1, 2])
def test_tokens_usage_and_endings_are_those_without_lag(name, num_choices):
    heard = []
    for lag in (0, 1):
        drive = driver(lag=lag, **WORKLOADS[name])
        for i in range(9):
            drive.send(
                generate_request(
                    f"r{i}",
                    (i, *LONG[i : 20 + 3 * i]),
                    5 + 3 * i,
                    tenant="ab"[i % 2],
                    tier=("interactive", "batch")[i % 3 == 2],
                    num_choices=num_choices,
                    sampling=SamplingParams(i, float(i % 2), stop_token_ids=(101,) if i % 4 == 0 else ()),
                )
            )
            drive.step()
            drive.step()
        drive.run().check_idle()
        heard.append((*outcome(drive), drive.engine.totals))
    tokens, finishes, endings, totals = zip(*heard, strict=True)
    assert tokens[0] == tokens[1]
    assert finishes[0] == finishes[1]
    same = ("cache_read", "cache_write", "uncached", "output")
    if name == "tiny pool":  # when somebody is preempted is a matter of time, what is cached then too
        assert all(t.num_preempted > 0 for t in totals)
        same = ("output",)
    for key, (kind, reason, usage) in endings[0].items():
        other = endings[1][key]
        assert (kind, reason) == other[:2]
        assert [getattr(usage, f) for f in same] == [getattr(other[2], f) for f in same]
        assert usage.prompt == other[2].prompt


# --- errors ---


def three_in_decode(**options):
    drive = driver(max_running=4, **options)
    drive.send(*[generate_request(f"r{i}", LONG[i : 20 + i], 12, seed=i) for i in range(2)])
    for _ in range(3):
        drive.step()
    drive.send(generate_request("late", LONG[5:30], 9))
    return drive


@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
def test_a_step_that_fails_is_run_again_and_what_followed_of_it_is_dropped(where, caplog):
    drive = three_in_decode()
    setattr(drive.runner, where, RuntimeError("a kernel failed"))
    if where == "fail_launch":
        drive.step()  # `late` is in it too
    else:
        held = drive.requests.pop((LINK, "late"))
        drive.inbox.clear()
        drive.step()  # launches the one that fails, without `late`
        drive.send(held)
        drive.step()
    drive.run().check_idle()
    assert "a kernel failed" in caplog.text
    for request in drive.requests.values():
        drive.check_alone(request)
    assert GARBAGE not in {t for tokens in drive.tokens.values() for t in tokens}


def test_what_was_computed_before_a_launch_failed_is_delivered():
    drive = three_in_decode()
    before = len(drive.tokens[LINK, "r0", 0])
    drive.runner.fail_launch = RuntimeError("a kernel failed")
    drive.step()
    assert len(drive.tokens[LINK, "r0", 0]) == before + 1
    drive.run().check_idle()


# --- a device without memory ---


@pytest.mark.parametrize("late", [False, True], ids=["in launch", "in collect"])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_too_large_is_made_smaller_and_no_attempt_fails(lag, late):
    drive = driver(num_blocks=200, lag=lag, device={"max_step_tokens": 40, "late": late})
    requests = [generate_request(f"r{i}", LONG[i:], 20, seed=i, tier=("interactive", "batch")[i % 2]) for i in range(6)]
    drive.send(*requests)
    drive.run().check_idle()
    for request in requests:
        drive.check_alone(request)
        assert drive.endings[LINK, request.request_id].reason == "length"
    assert drive.runner.num_out_of_memory > 0
    assert sum(o.num_out_of_memory for o in drive.outputs) == drive.runner.num_out_of_memory
    assert drive.engine.totals.num_preempted > 0


def test_the_latest_arrivals_go_first_and_batch_before_interactive():
    drive = driver(num_blocks=200, lag=0, device={})
    for i in range(4):
        tier = "batch" if i == 1 else "interactive"
        drive.send(generate_request(f"r{i}", LONG[i:], 30, seed=i, tier=tier))
    for _ in range(6):  # until all of them decode
        drive.step()
    drive.runner.fail_launch = DeviceOutOfMemory("full")
    drive.step()
    running = [s.attempt.message.request_id for s in drive.scheduler.running["interactive"]]
    assert (running, drive.scheduler.running["batch"]) == (["r0", "r2"], [])
    assert drive.scheduler.budget.num_tokens == 2
    drive.run().check_idle()


@pytest.mark.parametrize("late", [False, True])
def test_a_lone_prompt_halves_its_chunk_until_it_fits(late):
    drive = driver(device={"max_step_tokens": 9, "late": late})
    request = generate_request("r", LONG, 9)
    drive.send(request)
    drive.run().check_idle()
    drive.check_alone(request)
    chunks = [e.num_tokens for e in drive.endings[LINK, "r"].timeline if e.name == "chunk"]
    assert chunks[0] == len(LONG) // 2 // 2 // 2
    assert drive.engine.totals.num_preempted == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_only_a_step_of_one_token_that_does_not_fit_fails_its_attempt(lag, late):
    drive = driver(lag=lag, device={"max_step_tokens": 0, "late": late})
    drive.send(*[generate_request(f"r{i}", LONG[i:], 9) for i in range(3)])
    drive.run().check_idle()
    assert {e.code for e in drive.endings.values()} == {"internal"}
    drive.runner.max_step_tokens = None
    request = generate_request("next", LONG, 9)
    drive.send(request)
    drive.run().check_idle()
    drive.check_alone(request)


def test_copies_that_did_not_fit_fail_their_step_instead_of_giving_wrong_tokens(monkeypatch):
    """The tables name the new blocks already; nobody would copy again."""
    drive = driver()
    drive.send(generate_request("r", LONG[:18], 9, num_choices=2, temperature=1.0))
    drive.step()

    def full(pairs):
        raise DeviceOutOfMemory("full")

    monkeypatch.setattr(drive.runner, "copy_blocks", full)
    drive.step()
    monkeypatch.undo()
    drive.run().check_idle()
    assert drive.endings[LINK, "r"].code == "internal"
    for index in range(2):
        drive.check_alone(drive.requests[LINK, "r"], index=index, exactly=False)


def test_copies_made_before_a_launch_that_did_not_fit_are_kept():
    drive = driver()
    drive.send(generate_request("r", LONG[:18], 9, num_choices=2, temperature=1.0))
    drive.step()
    drive.runner.fail_launch = DeviceOutOfMemory("full")
    drive.step()
    drive.run().check_idle()
    assert len(drive.runner.copies) == 1
    for index in range(2):
        drive.check_alone(drive.requests[LINK, "r"], index=index)


def test_the_budget_grows_back_when_steps_run_again():
    drive = driver(num_blocks=200, max_batch_tokens=64)
    drive.send(generate_request("r", LONG, 2 * RECOVERY_STEPS))
    drive.runner.fail_launch = DeviceOutOfMemory("full")
    drive.step()
    assert drive.scheduler.budget.num_tokens == len(LONG) // 2
    while drive.engine.totals.num_steps < RECOVERY_STEPS:
        assert drive.scheduler.budget.num_tokens == len(LONG) // 2
        drive.step()
    assert drive.scheduler.budget.num_tokens == len(LONG) // 2 * 2
    drive.run().check_idle()
    assert drive.scheduler.budget.num_tokens == 64
    assert drive.runner.num_out_of_memory == 0, "it was the test that said so"


# --- what is measured ---


def test_a_record_says_when_a_step_was_planned_launched_and_collected():
    drive = driver()
    clock = iter(range(1, 1000))
    drive.engine._clock = drive.engine._pipeline._clock = lambda: float(next(clock))
    drive.send(generate_request("r", LONG, 4))
    drive.run()
    records = [record for output in drive.outputs for record in output.steps]
    assert [record.step for record in records] == [0, 1, 2, 3]
    for record in records:
        assert record.planned_at < record.launched_at < record.collected_at
        assert record.plan_s > 0 < record.execute_s
    for before, after in itertools.pairwise(records):
        assert after.launched_at < before.collected_at, "launched ahead"
        assert after.execute_s == after.collected_at - before.collected_at
    assert sum(record.idle_s for record in records) == 0


def test_the_device_idles_between_steps_without_lag_but_not_for_want_of_requests():
    drive = driver(lag=0)
    drive.send(generate_request("a", LONG, 3))
    drive.run()
    for _ in range(5):
        drive.step(after_s=60)
    drive.send(generate_request("b", LONG, 3))
    drive.run()
    idle = [record.idle_s for output in drive.outputs for record in output.steps]
    assert idle == pytest.approx([0, 0.01, 0.01, 0, 0.01, 0.01])


def test_metrics_count_every_step_of_a_round_and_those_that_did_not_fit():
    metrics = Metrics("m", 0, 4, 64)
    drive = driver(eos_every=5, device={"max_step_tokens": 30})
    drive.send(generate_request("r", LONG, 200))
    drive.run()
    for output in drive.outputs:
        metrics.observe(output)
    totals = drive.engine.totals

    def value(name):
        return metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0"})

    assert value("headgate_lag_discarded_tokens_total") == totals.num_lag_discarded == 1
    assert value("headgate_out_of_memory_steps_total") == drive.runner.num_out_of_memory == 1
    assert value("vllm:generation_tokens_total") == totals.num_output_tokens
    count = metrics.registry.get_sample_value("headgate_step_seconds_count", {"phase": "execute"})
    assert count == totals.num_steps == sum(len(output.steps) for output in drive.outputs)


def test_the_scripted_oracle_knows_how_a_request_ends():
    """The tests above would prove nothing with an oracle that never ends."""
    assert expected_output(LONG, SamplingParams(7, 0.0), 200, eos_every=5)[-1] == EOS
