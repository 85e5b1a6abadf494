import gc
import weakref

import pytest
from engine_driver import EOS, LINK, Driver
from fakes import VOCAB_SIZE, ScriptedRunner, encode, generate_request

from cache.blocks.usage import SHARED
from workers.engine.engine import Drain, LinkClosed
from workers.engine.sequences.sequence import Status
from workers.protocol.messages import Cancel, ExtendLease, Failed, Finished, Region, SamplingParams, StepFrame

LONG = encode("the quick brown fox jumps over the lazy dog and then sleeps")


@pytest.fixture(params=[0, 1], ids=["at-once", "one-step-late"], autouse=True)
def lag(request, monkeypatch):
    """What the engine promises holds on both kinds of device."""
    monkeypatch.setattr(Driver, "lag", request.param)
    return request.param


def driver(num_blocks=64, block_size=4, eos_every=0, **options):
    runner = ScriptedRunner(num_blocks=num_blocks, block_size=block_size, eos_every=eos_every)
    made = Driver(runner, **options)
    made.eos_every = eos_every
    return made


def preempt_everything(drive):
    """As if blocks were short: every running sequence loses its own."""
    for sequences in drive.scheduler.running.values():
        for sequence in tuple(sequences):
            drive.scheduler.ranks.preempt(sequence, drive.now, "blocks")


# --- the same tokens, however the work is cut up ---


@pytest.mark.parametrize("chunk", [2, 7, 16, 256])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_the_request_alone(chunk, num_choices, hit, temperature):
    drive = driver(max_batch_tokens=chunk + 3, max_running=4)
    if hit:
        drive.send(generate_request("warm", LONG, 6, seed=3))
        drive.run()
    requests = [
        generate_request(f"r{i}", LONG[: 20 + 13 * i], 11, seed=i, temperature=temperature, num_choices=num_choices)
        for i in range(3)
    ]
    drive.send(*requests)
    drive.run().check_idle()
    for request in requests:
        for index in range(num_choices):
            drive.check_alone(request, index=index)
    if hit:
        assert drive.endings[LINK, "r2"].usage.cache_read >= 40


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("options", [{}, {"cache_read": False}, {"cache_write": False}, {"prompt_logprobs": 0}])
def test_preemption_at_every_step_changes_no_token_and_no_prompt_count(num_choices, options):
    request = generate_request("r", LONG, 9, num_choices=num_choices, temperature=1.0, **options)
    for at in range(1, 14):
        drive = driver(max_batch_tokens=16, max_running=8)
        drive.send(request)
        for _ in range(at):
            drive.step()
        preempt_everything(drive)
        drive.run().check_idle()
        for index in range(num_choices):
            drive.check_alone(request, index=index)
        usage = drive.endings[LINK, "r"].usage
        assert usage.prompt == len(LONG)
        assert usage.output == 9 * num_choices


def test_preemption_before_every_step_still_ends():
    drive = driver(max_batch_tokens=200)
    request = generate_request("r", LONG, 12, num_choices=2)
    drive.send(request)
    while drive.inbox or drive.engine.attempts:
        drive.step()
        preempt_everything(drive)
    drive.check_idle()
    for index in range(2):
        drive.check_alone(request, index=index)


def test_a_pool_too_small_for_all_preempts_and_gives_the_same_tokens():
    drive = driver(num_blocks=26)
    requests = [generate_request(f"r{i}", encode(f"prompt {i} of these"), 30, seed=i) for i in range(6)]
    drive.send(*requests)
    drive.run().check_idle()
    assert drive.engine.totals.num_preempted > 0
    assert drive.engine.totals.num_recomputed > 0
    for request in requests:
        drive.check_alone(request)


def test_a_lone_request_can_use_everything_the_pool_offers():
    drive = driver(num_blocks=16)
    max_len = drive.scheduler.limits.max_len
    request = generate_request("r", LONG[:9], max_len, lease_bound=max_len)
    drive.send(request)
    drive.run().check_idle()
    assert len(drive.tokens[LINK, "r", 0]) == max_len - 9
    assert drive.finishes[LINK, "r", 0] == "length"
    assert drive.engine.totals.num_preempted == 0


def test_more_choices_than_the_pool_holds_at_once_still_end():
    drive = driver(num_blocks=20)
    request = generate_request("r", LONG[:20], 24, num_choices=6, temperature=1.0)
    drive.send(request)
    drive.run().check_idle()
    for index in range(6):
        drive.check_alone(request, index=index)


# --- parallel choices ---


@pytest.mark.parametrize(("length", "num_copies"), [(16, 0), (18, 3)])
def test_choices_share_the_prompt_and_copy_only_a_partly_filled_tail(length, num_copies):
    drive = driver()
    drive.send(generate_request("r", LONG[:length], 3, num_choices=4, temperature=1.0))
    drive.run().check_idle()
    assert len(drive.runner.copies) == num_copies
    assert drive.engine.totals.num_prefill_tokens == length
    assert drive.endings[LINK, "r"].usage.output == 12


def test_unwritten_prompts_are_shared_by_reference_count_alone():
    drive = driver()
    request = generate_request("r", LONG, 6, num_choices=3, cache_write=False, temperature=1.0)
    drive.send(request)
    drive.run().check_idle()
    for index in range(3):
        drive.check_alone(request, index=index)
    assert drive.engine.totals.num_prefill_tokens == len(LONG)
    assert drive.cache.num_evictable == 0


def test_a_choice_may_be_cancelled_before_the_fork_even_the_one_that_carries_the_prompt():
    drive = driver(max_batch_tokens=16, max_running=8)
    request = generate_request("r", LONG, 4, num_choices=3, temperature=1.0)
    drive.send(request)
    drive.step()
    drive.send(Cancel("r", 0))
    drive.run().check_idle()
    assert drive.tokens[LINK, "r", 0] == []
    assert drive.finishes[LINK, "r", 0] == "cancelled"
    for index in (1, 2):
        drive.check_alone(request, index=index)
    assert drive.endings[LINK, "r"].reason == "length"


# --- ends ---


def test_an_end_token_ends_a_choice_and_counts():
    drive = driver(eos_every=5)
    request = generate_request("r", LONG, 200)
    drive.send(request)
    drive.run().check_idle()
    drive.check_alone(request)
    assert drive.tokens[LINK, "r", 0][-1] == EOS
    assert drive.records[-1].stop_token == EOS
    assert drive.endings[LINK, "r"].reason == "stop"
    assert drive.endings[LINK, "r"].usage.output == len(drive.tokens[LINK, "r", 0])


def test_ignore_eos_goes_on_and_given_stop_ids_still_end():
    drive = driver(eos_every=5)
    plain = generate_request("plain", LONG, 40, sampling=SamplingParams(7, 0.0, ignore_eos=True))
    drive.send(plain)
    drive.run()
    assert len(drive.tokens[LINK, "plain", 0]) == 40
    stop = drive.tokens[LINK, "plain", 0][11]
    stopped = generate_request(
        "stopped", LONG, 40, sampling=SamplingParams(7, 0.0, ignore_eos=True, stop_token_ids=(stop,))
    )
    drive.send(stopped)
    drive.run().check_idle()
    drive.check_alone(stopped)
    assert drive.finishes[LINK, "stopped", 0] == "stop"


def test_max_tokens_zero_computes_the_prompt_and_draws_nothing():
    drive = driver()
    drive.send(generate_request("fill", LONG, 0))
    drive.run().check_idle()
    ending = drive.endings[LINK, "fill"]
    assert isinstance(ending, Finished)
    assert (ending.usage.output, ending.usage.prompt) == (0, len(LONG))
    assert drive.prompt_counts[LINK, "fill"].cache_write == len(LONG) // 4 * 4
    drive.send(generate_request("hit", LONG, 2))
    drive.run().check_idle()
    assert drive.endings[LINK, "hit"].usage.cache_read == (len(LONG) - 1) // 4 * 4


def test_a_pinned_fill_reports_its_blocks_and_keeps_them():
    drive = driver(num_blocks=120)
    drive.send(generate_request("fill", LONG, 0, pinned=True))
    drive.run().check_idle()
    assert drive.endings[LINK, "fill"].cache.num_pinned_blocks == len(LONG) // 4
    assert drive.cache.num_pinned == len(LONG) // 4


def test_a_published_prefix_is_read_by_every_tenant_and_a_tenants_own_by_nobody_else():
    public = b"public".ljust(16)
    drive = driver()
    drive.send(generate_request("fill", LONG[:33], 0, tenant="operator", namespace=(Region(public),)))
    drive.run()
    for tenant in ("a", "b"):
        path = (Region(public, 33), Region(tenant.encode() * 16))
        for turn in ("1", "2"):
            drive.send(generate_request(tenant + turn, LONG, 2, tenant=tenant, namespace=path))
            drive.run().check_idle()
    reports = {key: drive.endings[LINK, key].cache for key in ("a1", "b1", "a2", "b2")}
    assert [reports[k].cached_tokens for k in ("a1", "b1")] == [32, 32]
    assert reports["a1"].public_tokens == 32
    assert all(reports[k].cached_tokens > 32 for k in ("a2", "b2"))


def test_prompt_logprobs_come_with_the_first_delta_for_every_token_but_the_first():
    drive = driver(max_batch_tokens=10, max_running=4)
    drive.send(generate_request("warm", LONG, 2))
    drive.run()
    drive.send(generate_request("r", LONG, 3, prompt_logprobs=1))
    drive.run().check_idle()
    logprobs = drive.prompt_logprobs[LINK, "r"]
    assert logprobs[0] is None
    assert len(logprobs) == len(LONG)
    assert [entry.top[0].token for entry in logprobs[1:]] == list(LONG[1:])
    assert drive.endings[LINK, "r"].usage.cache_read == 0


def test_token_logprobs_are_passed_on():
    drive = driver()
    drive.send(generate_request("r", LONG, 3, sampling=SamplingParams(7, 0.0, logprobs=2)))
    drive.run()
    assert all(len(delta.logprobs[0].top) == 2 for delta in drive.records)


def test_the_report_says_why_the_prompt_was_not_cached_further():
    drive = driver(num_blocks=30)
    other = encode("something else entirely, of the same length as it is")
    for name, prompt, fields in (
        ("cold", LONG[:40], {}),
        ("hit", LONG[:40], {}),
        ("diverged", LONG[:30] + other[:10], {}),
        ("opt_out", LONG[:40], {"cache_read": False}),
        ("filler", other[:48], {"tenant": "filler"}),
        ("filler2", other[1:49], {"tenant": "filler"}),
        ("evicted", LONG[:40], {}),
    ):
        drive.send(generate_request(name, prompt, 2, **fields))
        drive.run()
    reports = {name: ending.cache for (_, name), ending in drive.endings.items()}
    assert reports["cold"].miss_reason == "cold"
    assert reports["hit"].cached_tokens == 36
    assert reports["diverged"].diverged_at_token == 30
    assert reports["opt_out"].miss_reason == "opt_out"
    assert reports["evicted"].miss_reason == "evicted"
    assert 0 < reports["evicted"].evicted_age_ms < 1000
    drive.check_idle()


# --- cancel, links, drain ---


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_cancel_in_every_phase_frees_all_blocks_within_the_step(num_choices, lag):
    for at in range(18):
        drive = driver(max_batch_tokens=16, max_running=8)
        request = generate_request("r", LONG, 9, num_choices=num_choices, temperature=1.0)
        drive.send(request)
        for _ in range(at):
            drive.step()
        if not drive.engine.attempts and at:
            break
        drive.send(Cancel("r"))
        drive.step()
        drive.check_idle()
        ending = drive.endings[LINK, "r"]
        assert ending.reason == "cancelled"
        assert {drive.finishes[LINK, "r", i] for i in range(num_choices)} == {"cancelled"}
        for index in range(num_choices):
            drive.check_alone(request, index=index, exactly=False)
        if at <= 3:
            assert ending.usage.prompt == min(len(LONG), 16 * max(0, at - lag))
    else:
        pytest.fail("the request never ended by itself")


def test_cancels_and_extensions_of_unknown_requests_are_late_not_wrong():
    drive = driver()
    drive.send(Cancel("gone"), ExtendLease("gone", 1, 10))
    drive.step()
    drive.check_idle()


def test_a_lost_link_ends_its_attempts_within_the_step_and_tells_nobody():
    drive = driver()
    drive.send(generate_request("mine", LONG, 50), link=1)
    drive.send(generate_request("other", LONG, 20), link=2)
    for _ in range(3):
        drive.step()
    drive.send(LinkClosed(), link=1)
    output = drive.step()
    assert [a.message.request_id for a in output.ended] == ["mine"]
    assert output.ended[0].end_reason == "link_lost"
    drive.run().check_idle()
    assert (1, "mine") not in drive.endings
    drive.check_alone(drive.requests[2, "other"], link=2)


def test_equal_request_ids_on_two_links_do_not_meet():
    drive = driver()
    one, two = generate_request("r", LONG, 9, seed=1), generate_request("r", LONG[5:], 9, seed=2)
    drive.send(one, link=1)
    drive.send(two, link=2)
    drive.step()
    drive.send(Cancel("r"), link=2)
    drive.run().check_idle()
    drive.check_alone(one, link=1)
    assert drive.endings[1, "r"].reason == "length"
    assert drive.endings[2, "r"].reason == "cancelled"


def test_one_frame_per_step_and_link_carries_all_deltas():
    drive = driver(num_blocks=256, max_batch_tokens=1000)
    for link in (1, 2):
        requests = [generate_request(f"r{i}", LONG[i:], 5, tenant=f"t{link}") for i in range(4)]
        drive.send(*requests, link=link)
    drive.step()
    output = drive.step()
    frames = {link: m for link, m in output.messages if isinstance(m, StepFrame)}
    assert len([m for _, m in output.messages if isinstance(m, StepFrame)]) == 2
    assert all(len(frame.deltas) == 4 for frame in frames.values())


def test_what_ended_is_not_kept():
    drive = driver()
    kept = []
    for index in range(40):
        drive.send(generate_request(f"r{index}", LONG[:9], 5))
        drive.step()
        kept += [weakref.ref(attempt) for attempt in drive.engine.attempts.values()]
        drive.run()
    drive.check_idle()
    drive.outputs.clear()
    gc.collect()
    assert len(kept) == 40
    assert sum(one() is not None for one in kept) <= 4, "ended attempts are kept"


def test_draining_refuses_new_requests_and_finishes_running_ones():
    drive = driver()
    running = generate_request("running", LONG, 9)
    drive.send(running)
    drive.step()
    drive.send(Drain(), generate_request("late", LONG, 3))
    output = drive.step()
    assert output.status.draining
    failed = drive.endings[LINK, "late"]
    assert failed.code == "draining"
    drive.run().check_idle()
    drive.check_alone(running)


def test_the_drain_limit_fails_what_still_runs_with_its_usage(lag):
    drive = driver()
    drive.send(generate_request("r", LONG, 100))
    for _ in range(4):
        drive.step()
    drive.send(Drain(now=True))
    drive.step()
    failed = drive.endings[LINK, "r"]
    assert failed.code == "draining"
    assert failed.usage.output == len(drive.tokens[LINK, "r", 0]) == 4 - lag
    drive.check_idle()


# --- resumption ---


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_resumed_attempt_continues_exactly_and_counts_only_what_is_new(num_choices, cut):
    request = generate_request("r", LONG, 12, num_choices=num_choices, temperature=1.0)
    first = driver()
    first.send(request)
    first.run()
    whole = {i: first.tokens[LINK, "r", i] for i in range(num_choices)}
    resumed = generate_request(
        "r",
        LONG,
        12,
        num_choices=num_choices,
        temperature=1.0,
        attempt=1,
        resume=tuple((i, tuple(whole[i][:cut])) for i in range(1, num_choices) or range(1)),
        num_output_spent=cut * num_choices,
    )
    drive = driver(max_batch_tokens=30, max_running=8)
    drive.send(resumed)
    drive.run().check_idle()
    for index, handed in resumed.resume:
        assert list(handed) + drive.tokens[LINK, "r", index] == whole[index]
    usage = drive.endings[LINK, "r"].usage
    assert usage.output == (12 - cut) * len(resumed.resume)
    assert usage.prompt == len(LONG)
    assert usage.recomputed >= (cut - 1) * len(resumed.resume)


# --- leases ---


def test_a_sequence_parks_at_its_bound_and_goes_on_when_extended():
    drive = driver()
    request = generate_request("r", LONG, 20, lease_bound=5)
    drive.send(request)
    for _ in range(12):
        drive.step()
    assert len(drive.tokens[LINK, "r", 0]) == 5
    assert drive.scheduler.num_running == 1
    drive.send(ExtendLease("r", 1, 9))
    for _ in range(12):
        drive.step()
    assert len(drive.tokens[LINK, "r", 0]) == 9
    drive.send(ExtendLease("r", 2, 20))
    drive.run().check_idle()
    drive.check_alone(request)
    names = [event.name for event in drive.endings[LINK, "r"].timeline]
    assert names.count("parked") == 2
    assert names[0] == "queued"
    assert names[-1] == "finished"


@pytest.mark.parametrize("num_choices", [1, 3])
def test_the_last_lease_ends_with_reason_budget_at_exactly_the_bound(num_choices):
    for bound in range(1, 10):
        drive = driver()
        drive.send(generate_request("r", LONG, 20, num_choices=num_choices, lease_bound=bound))
        drive.send(ExtendLease("r", 1, bound, last=True))
        drive.run().check_idle()
        ending = drive.endings[LINK, "r"]
        assert (ending.reason, ending.usage.output) == ("budget", bound)
        lengths = [len(drive.tokens[LINK, "r", i]) for i in range(num_choices)]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths) - min(lengths) <= 1


def test_last_said_while_parked_ends_at_once():
    drive = driver()
    drive.send(generate_request("r", LONG, 20, lease_bound=3))
    for _ in range(8):
        drive.step()
    drive.send(ExtendLease("r", 1, 3, last=True))
    drive.step()
    assert drive.endings[LINK, "r"].reason == "budget"
    drive.check_idle()


def test_stale_and_falling_extensions_are_ignored():
    drive = driver()
    drive.send(generate_request("r", LONG, 20, lease_bound=4))
    drive.send(ExtendLease("r", 3, 6), ExtendLease("r", 2, 20), ExtendLease("r", 3, 20), ExtendLease("r", 4, 5))
    for _ in range(15):
        drive.step()
    assert len(drive.tokens[LINK, "r", 0]) == 6


def test_a_parked_sequence_loses_its_blocks_then_resumes_exactly():
    drive = driver()
    request = generate_request("r", LONG, 20, lease_bound=5, num_choices=2, temperature=1.0)
    drive.send(request)
    for _ in range(10):
        drive.step()
    drive.step(after_s=2.1)
    assert drive.scheduler.num_running == 0
    assert drive.cache.available(SHARED) == drive.cache.num_blocks - 1
    other = generate_request("other", encode("somebody else"), 5)
    drive.send(other)
    for _ in range(8):
        drive.step()
    drive.check_alone(other)
    drive.send(ExtendLease("r", 1, 40))
    drive.run().check_idle()
    for index in range(2):
        drive.check_alone(request, index=index)


def test_silence_of_15_s_ends_a_parked_attempt_and_a_paced_word_restarts_the_clock():
    drive = driver()
    drive.send(generate_request("r", LONG, 20, lease_bound=5))
    for _ in range(10):
        drive.step()
    drive.step(after_s=10)
    drive.send(ExtendLease("r", 1, 5, wait_ms=3000))
    drive.step()
    drive.step(after_s=10)
    assert drive.engine.attempts
    drive.step(after_s=5.1)
    ending = drive.endings[LINK, "r"]
    assert (ending.reason, ending.usage.output) == ("lease", 5)
    drive.check_idle()


@pytest.mark.parametrize("goes_on", ["extended", "choices cancelled"])
def test_a_lease_smaller_than_the_choices_is_waited_for_without_computing_again(goes_on):
    drive = driver()
    request = generate_request("r", LONG, 4, num_choices=4, lease_bound=2, temperature=1.0)
    drive.send(request)
    for _ in range(500):
        drive.step()
    assert drive.scheduler.num_running == 0
    assert drive.scheduler.ranks.num_preempted["interactive"]["lease"] == 1
    assert drive.attempt("r").num_recomputed == 0
    drive.send(ExtendLease("r", 1, 3, wait_ms=3000))
    for _ in range(100):
        drive.step()
    assert drive.scheduler.ranks.num_preempted["interactive"]["lease"] == 1
    if goes_on == "extended":
        drive.send(ExtendLease("r", 2, 16))
    else:
        drive.send(*(Cancel("r", index) for index in (0, 3)))
        for _ in range(20):
            drive.step()
        drive.send(ExtendLease("r", 2, 8))
    drive.run().check_idle()
    for index in range(4) if goes_on == "extended" else (1, 2):
        drive.check_alone(request, index=index)


def test_a_lease_smaller_than_the_choices_waits_before_the_fork():
    drive = driver()
    request = generate_request("r", LONG, 4, num_choices=3, lease_bound=2, temperature=1.0)
    drive.send(request)
    for _ in range(6):
        drive.step()
    assert not any(drive.tokens.values())
    assert drive.attempt("r").sequences[0].num_unscheduled == 1
    drive.send(ExtendLease("r", 1, 12))
    drive.run().check_idle()
    for index in range(3):
        drive.check_alone(request, index=index)


# --- refusals and broken steps ---


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"root": "other"}, "wrong_root"),
        ({"lease_bound": 0}, "no_lease"),
        ({"prompt": (1,) * 5000}, "too_long"),
        ({"prompt": ()}, "internal"),
        ({"prompt": (1, 259)}, "internal"),
        ({"prompt": (1, -1)}, "internal"),
        ({"num_choices": 0}, "internal"),
        ({"num_choices": 65, "lease_bound": 99}, "too_long"),
        ({"weight": 0.0}, "internal"),
        ({"weight": float("nan")}, "internal"),
        ({"seed": -1}, "internal"),
        ({"namespace": (Region(b"a", 3),)}, "internal"),
        ({"namespace": (Region(b"a", 3), Region(b"a"))}, "internal"),
        ({"sampling": SamplingParams(seed=1, logit_bias=((VOCAB_SIZE, 1.0),))}, "internal"),
        ({"sampling": SamplingParams(seed=1, logit_bias=((2**31, 1.0),))}, "internal"),
        ({"sampling": SamplingParams(seed=1, logit_bias=((-1, 1.0),))}, "internal"),
        ({"sampling": SamplingParams(seed=1, stop_token_ids=(VOCAB_SIZE,))}, "internal"),
        ({"grammar": "x"}, "grammar"),
        ({"resume": ((0, (1,) * 9),)}, "internal"),
        ({"resume": ((3, (1,)),)}, "internal"),
    ],
)
def test_a_request_that_cannot_run_fails_and_leaves_nothing(fields, code):
    drive = driver()
    drive.send(generate_request("r", **fields))
    drive.step()
    assert drive.endings[LINK, "r"].code == code
    drive.check_idle()


def test_a_double_request_id_fails_without_hurting_the_first():
    drive = driver()
    request = generate_request("r", LONG, 5)
    drive.send(request)
    drive.step()
    output = drive.engine.step([(LINK, generate_request("r", LONG, 5))])
    failed = [m for _, m in output.messages if isinstance(m, Failed)]
    assert [m.code for m in failed] == ["internal"]
    drive._hear(type(output)(output.status, 0, [m for m in output.messages if m[1] not in failed]))
    drive.run().check_idle()
    drive.check_alone(request)


def test_a_step_that_failed_by_chance_is_run_again_and_nobody_notices(caplog):
    drive = driver(max_running=2)
    drive.send(*[generate_request(f"r{i}", LONG[i:], 9) for i in range(3)])
    drive.step()
    drive.step()
    drive.runner.fail_next = RuntimeError("a kernel failed")
    drive.run().check_idle()
    assert "a kernel failed" in caplog.text
    for request in drive.requests.values():
        drive.check_alone(request)


def test_statuses_follow_a_sequence_through_its_life(lag):
    drive = driver()
    drive.send(generate_request("r", LONG, 20, lease_bound=5))
    for _ in range(1 + lag):
        drive.step()
    attempt = drive.attempt("r")
    sequence = attempt.sequences[0]
    assert sequence.status is Status.RUNNING
    drive.scheduler.ranks.preempt(sequence, drive.now, "blocks")
    assert sequence.status is Status.PREEMPTED
    for _ in range(8):
        drive.step()
    drive.step(after_s=2.1)
    assert sequence.status is Status.SUSPENDED
    drive.send(Cancel("r"))
    drive.step()
    assert sequence.status is Status.ENDED
    names = [event.name for event in drive.endings[LINK, "r"].timeline]
    assert [n for n in names if n != "chunk"] == [
        "queued",
        "matched",
        "first_token",
        "preempted",
        "resumed",
        "parked",
        "preempted",
        "finished",
    ]
