"""Sequences within a KV budget: what stays, what the tree gets, and how it goes with everything else."""

from __future__ import annotations

from contextlib import closing

import pytest
from engine_driver import LINK, Driver
from fakes import EOS, encode, generate_request
from hypothesis import given
from hypothesis import strategies as st
from thinned_runner import ThinnedRunner, check_tree

from cache.blocks.usage import SHARED
from workers.engine import settings
from workers.engine.__main__ import build_engine
from workers.engine.journal.journal import EngineJournal
from workers.engine.sparsity.budget import MIN_BLOCKS, NUM_SINKS, Sparsity, received
from workers.engine.values.errors import StartError
from workers.engine.values.probe import DECAY
from workers.protocol.messages import BeamParams, SamplingParams

SIZE, BUDGET = 4, 6
PROMPT = encode("the quick brown fox jumps over the lazy dog an")
MARKED = encode("the quick brown !!! jumps over the lazy dog an")
LASTING = SamplingParams(seed=3, ignore_eos=True)


def driver(*, policy="heavy", budget=BUDGET, num_blocks=64, **options):
    sparsity = Sparsity(policy, budget, SIZE) if budget else None
    runner = ThinnedRunner(num_blocks=num_blocks, block_size=SIZE)
    return Driver(runner, sparsity=sparsity, **options)


def ask(name="r", prompt=PROMPT, max_tokens=40, **fields):
    fields.setdefault("sampling", LASTING)
    return generate_request(name, prompt, max_tokens, **fields)


def run(drive, *requests):
    """Every law after every step: the bound of those that decode, the tree."""
    drive.send(*requests)
    while not drive.idle:
        drive.step()
        check_tree(drive)
        for sequence in drive.scheduler.all_running:
            if drive.scheduler.layout.num_dropped(sequence):
                assert len(sequence.block_ids) <= BUDGET
                assert sequence.handle.num_tree_blocks == 0
    return drive.check_idle()


# --- what stays ---


@given(st.integers(MIN_BLOCKS, 12), st.booleans(), st.lists(st.floats(0, 4), max_size=40), st.data())
def test_of_any_blocks_the_first_the_last_and_the_heaviest_stay(budget, is_full, mass, data):
    num_held = data.draw(st.integers(max(budget, len(mass)), 50))
    sparsity, number = Sparsity("heavy", budget, SIZE), budget - is_full
    kept = sparsity.kept(mass, num_held, number)
    num_recent = (budget - NUM_SINKS) // 2
    assert kept == sorted(set(kept))
    assert len(kept) == min(number, num_held)
    assert kept[0] == 0 and kept[-num_recent:] == list(range(num_held - num_recent, num_held))
    known = [*mass, *[0.0] * (num_held - len(mass))]
    between = set(range(1, num_held - num_recent))
    gone = between - set(kept)
    assert all(known[a] >= known[b] for a in between & set(kept) for b in gone)


def test_without_any_measure_the_latest_stay():
    assert Sparsity("heavy", 6, SIZE).kept([], 12, 6) == [0, 7, 8, 9, 10, 11]


def test_what_was_seen_long_ago_counts_less():
    once = received([], [0.5, 0.5])
    again = received(once, [0.0, 0.0, 1.0])
    assert again == pytest.approx([0.5 * DECAY, 0.5 * DECAY, 1.0])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.data())
def test_attention_is_the_same_in_however_many_steps_it_came(seen, data):
    """`seen`: the one block that each query looks at."""

    def together(queries):
        mass = [0.0] * 4
        for block in queries:
            mass = [DECAY * one for one in mass]
            mass[block] += 1
        return mass

    steps, left = [], list(seen)
    while left:
        number = data.draw(st.integers(1, len(left)))
        steps.append(together(left[:number]))
        left = left[number:]
    found = []
    for step in steps:
        found = received(found, step)
    assert found == pytest.approx(together(seen))


@pytest.mark.parametrize("policy", ["heavy", "recent"])
def test_what_was_looked_at_is_still_there_at_the_end(policy):
    """A mark in the middle of the prompt, 60 tokens later."""
    drive = driver(policy=policy)
    drive.send(ask(prompt=MARKED, max_tokens=60))
    texts = []
    while not drive.idle:
        drive.step()
        texts += [drive.runner.text_of(s.block_ids) for s in drive.scheduler.all_running]
    assert b"!!!" in texts[0]
    assert (b"!" in texts[-1]) == (policy == "heavy")
    assert drive.runner.num_observed > 0 or policy == "recent"


# --- the bound ---


@pytest.mark.parametrize("policy", ["heavy", "recent"])
@pytest.mark.parametrize("length", range(16, 33))
def test_who_decodes_sees_no_more_than_the_budget(policy, length):
    drive = run(driver(policy=policy), ask(prompt=PROMPT[:length], max_tokens=41))
    rows = [row for step in drive.runner.steps for row in step if row.start > length]
    assert max(row.kv_start + 1 for row in rows) == BUDGET * SIZE
    (num_dropped,) = rows[-1].layout
    assert num_dropped % SIZE == 0 < num_dropped
    assert [row.start for row in rows] == list(range(length + 1, length + 40)), "positions stay"
    assert len(drive.tokens[LINK, "r", 0]) == 41


def test_the_timeline_says_what_was_dropped_and_when():
    drive = run(driver(), ask())
    (event,) = [e for e in drive.endings[LINK, "r"].timeline if e.name == "thinned"]
    assert event.num_tokens == (len(PROMPT) // SIZE + 1 - BUDGET) * SIZE
    assert event.step == 1


def test_a_prompt_is_computed_in_full_sight():
    drive = run(driver(max_batch_tokens=7, max_running=7), ask(max_tokens=1))
    assert not any(row.layout for step in drive.runner.steps for row in step)


def test_who_cannot_grow_beyond_the_budget_runs_as_if_there_were_none():
    request = ask(prompt=PROMPT[:10], max_tokens=BUDGET * SIZE - 10)
    sparse, plain = run(driver(), request), run(driver(budget=0), request)
    assert sparse.tokens == plain.tokens
    assert sparse.runner.steps == plain.runner.steps
    assert sparse.runner.num_observed == 0
    sparse.check_alone(request)


def test_who_could_grow_but_ends_before_has_its_tokens_too():
    request = ask(prompt=PROMPT[:10], max_tokens=BUDGET * SIZE - 9)
    run(driver(), request).check_alone(request)


# --- the tree ---


def test_the_tree_keeps_the_whole_prompt_for_others():
    drive = run(driver(), ask("first"))
    assert drive.endings[LINK, "first"].usage.cache_write == len(PROMPT) // SIZE * SIZE
    run(drive, ask("second"))
    assert drive.endings[LINK, "second"].usage.cache_read == len(PROMPT) // SIZE * SIZE
    assert drive.tokens[LINK, "first", 0][:1] == drive.tokens[LINK, "second", 0][:1]


def test_what_was_computed_without_sight_is_found_by_nobody():
    drive = run(driver(), ask("first"))
    text = [*PROMPT, *drive.tokens[LINK, "first", 0], 97]
    run(drive, ask("second", prompt=text, max_tokens=1))
    # The first token of the answer is written in full sight; its block is not full before more is dropped.
    assert drive.endings[LINK, "second"].usage.cache_read == len(PROMPT) // SIZE * SIZE


def test_while_it_decodes_its_prompt_may_be_evicted():
    """A pool that holds the long prompt once: another one comes in while the first still draws."""
    drive = driver(num_blocks=32)
    drive.send(ask("long", prompt=PROMPT, max_tokens=40))
    for _ in range(6):
        drive.step()
    held = 32 - 1 - drive.cache.available(SHARED)
    assert held == BUDGET
    run(drive, ask("other", prompt=encode("x" * 40), max_tokens=4, tenant="other"))
    assert drive.engine.totals.num_recomputed == 0


# --- with everything else ---


@pytest.mark.parametrize("write", [True, False])
def test_parallel_choices_part_and_each_holds_its_own(write):
    drive = driver(num_blocks=96)
    request = ask(
        num_choices=3,
        temperature=1.0,
        cache_write=write,
        sampling=SamplingParams(seed=9, ignore_eos=True, temperature=1.0),
    )
    run(drive, request)
    assert all(len(drive.tokens[LINK, "r", index]) == 40 for index in range(3))
    assert len({tuple(drive.tokens[LINK, "r", index]) for index in range(3)}) == 3


def test_blocks_that_a_sibling_gives_up_for_them_need_no_copy():
    """Found by the property test: the copies were counted before the sibling had to make room."""
    drive = driver(budget=8, num_blocks=30)
    text = encode("x" * 56)
    drive.send(ask("r", text, 3, num_choices=2, tier="batch", cache_write=False))
    drive.step()
    drive.send(ask("x", text[:30], 2, cache_read=False))
    drive.step()
    drive.step()
    carrier = drive.scheduler.running["batch"][0]
    assert drive.scheduler.preempted["batch"], "the sibling made room"
    assert drive.scheduler.layout.num_dropped(carrier) and len(carrier.block_ids) == 8
    assert drive.runner.copies == []
    drive.run().check_idle()


@pytest.mark.parametrize("num_choices", [1, 2])
def test_who_is_preempted_comes_back_in_full_sight_and_is_cut_again(num_choices):
    drive = driver(num_blocks=96)
    drive.send(ask(num_choices=num_choices))
    number = 0
    while not drive.idle:
        drive.step()
        number += 1
        check_tree(drive)
        running = drive.scheduler.all_running
        if number % 9 == 0 and running:
            drive.scheduler.ranks.preempt(running[-1], drive.now, "blocks")
    drive.check_idle()
    assert drive.engine.totals.num_recomputed > 0
    assert [len(tokens) for tokens in drive.tokens.values()] == [40] * num_choices


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_a_thinned_sequence_is_never_swapped(preempt):
    drive = driver(host={"num_slots": 64}, preempt=preempt)
    drive.send(ask())
    for _ in range(12):
        drive.step()
    (sequence,) = drive.scheduler.all_running
    assert drive.scheduler.layout.num_dropped(sequence)
    drive.scheduler.ranks.preempt(sequence, drive.now, "blocks")
    assert sequence.swapped is None
    run(drive)
    assert len(drive.tokens[LINK, "r", 0]) == 40


def test_a_step_that_fails_while_blocks_change_hands_loses_none():
    drive = driver()
    drive.send(ask("a"), ask("b", prompt=MARKED, tenant="b"))
    while not any(map(drive.scheduler.layout.num_dropped, drive.scheduler.all_running)):
        drive.runner.fail_next = None
        drive.step()
    drive.runner.fail_next = RuntimeError("a bad step")
    drive.step()
    run(drive, ask("c"))
    assert drive.endings[LINK, "c"].usage.output == 40


def test_many_share_a_pool_that_holds_few_of_their_prompts():
    drive = driver(num_blocks=40)
    requests = [ask(f"r{i}", prompt=[*PROMPT[: 20 + i], 65 + i], tenant=f"t{i % 3}") for i in range(12)]
    run(drive, *requests)
    assert all(drive.endings[LINK, r.request_id].usage.output == 40 for r in requests)


def test_a_device_that_answers_late_is_not_let_to():
    drive = driver(lag=1)
    drive.send(ask())
    drive.run().check_idle()
    assert drive.runner.num_late == 0


def test_beams_beyond_the_budget_are_refused_and_others_are_not():
    drive = driver()
    beams = {"num_choices": 2, "beams": BeamParams(1.0), "sampling": SamplingParams(seed=0)}
    drive.send(ask("long", **beams), ask("short", prompt=PROMPT[:8], max_tokens=8, **beams))
    drive.run().check_idle()
    assert drive.endings[LINK, "long"].code == "too_long"
    assert "KV budget" in drive.endings[LINK, "long"].message
    assert drive.endings[LINK, "short"].usage.output > 0


def test_an_end_token_ends_it():
    drive = driver()
    drive.runner._eos_every = drive.eos_every = 30
    run(drive, ask(max_tokens=200, prompt=PROMPT[:30], sampling=SamplingParams(seed=1)))
    tokens = drive.tokens[LINK, "r", 0]
    assert tokens[-1] == EOS or len(tokens) == 200


# --- the worker's settings ---


def worker(monkeypatch, tmp_path, budget, num_blocks=64):
    monkeypatch.setenv("HEADGATE_MODEL", "/models/scripted")
    monkeypatch.setenv("HEADGATE_ENGINE_KV_SPARSITY", "recent")
    monkeypatch.setenv("HEADGATE_ENGINE_KV_BUDGET", str(budget))
    runner = ThinnedRunner(num_blocks=num_blocks, block_size=SIZE)
    with closing(EngineJournal(tmp_path, "worker-0", "p", runner.root)) as journal:
        return build_engine(settings.load(), runner, journal)


def test_a_worker_takes_a_budget_and_keeps_room_for_copies(monkeypatch, tmp_path):
    engine = worker(monkeypatch, tmp_path, 27)
    assert engine.scheduler.layout.budget == Sparsity("recent", 6, SIZE)
    assert engine.scheduler.limits.max_len == (64 - 1 - 12 - 6) * SIZE


@pytest.mark.parametrize(("budget", "reason"), [(15, "fewer than 4 blocks"), (120, "more than half")])
def test_a_budget_that_cannot_be_is_refused_at_start(monkeypatch, tmp_path, budget, reason):
    with pytest.raises(StartError, match=reason):
        worker(monkeypatch, tmp_path, budget)
