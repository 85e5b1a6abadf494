from dataclasses import asdict, fields

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.values.record import PromptAccount, Rate, StepRecord, StepTotals


def parts(account):
    counts = account.counts
    return counts.cache_read, counts.cache_write, counts.uncached


def test_read_written_and_uncached_are_disjoint_and_add_up():
    account = PromptAccount(40)
    account.read_until(16)
    account.compute(16, 30)
    account.insert(16, 28)
    account.compute(30, 40)
    account.insert(28, 36)
    assert parts(account) == (16, 20, 4)


def test_what_is_computed_or_inserted_again_counts_once():
    account = PromptAccount(32)
    assert account.compute(0, 20) == 20
    account.insert(0, 16)
    assert account.compute(0, 20) == 0
    account.insert(0, 16)
    assert account.compute(20, 32) == 12
    assert parts(account) == (0, 16, 16)


def test_tokens_that_another_sequence_inserted_meanwhile_are_read():
    account = PromptAccount(32)
    account.compute(0, 10)
    assert account.read_until(24) == 14
    account.compute(24, 32)
    assert parts(account) == (14, 0, 18)


def test_closed_counts_stand():
    account = PromptAccount(18)
    account.compute(0, 18)
    account.insert(0, 16)
    assert account.close() == account.counts
    account.insert(16, 18)
    assert parts(account) == (0, 16, 2)


@given(st.integers(1, 60), st.data())
def test_against_a_set_per_position(num_tokens, data):
    """Any order of matches, chunks, losses and insertions."""
    account = PromptAccount(num_tokens)
    read, fresh, written = set(), set(), set()
    for _ in range(data.draw(st.integers(0, 8))):
        seen = len(read | fresh)
        match = data.draw(st.integers(0, num_tokens))
        account.read_until(match)
        read |= set(range(seen, match))
        start = data.draw(st.integers(0, max(seen, match)))
        end = data.draw(st.integers(start, num_tokens))
        new = set(range(start, end)) - read - fresh
        assert account.compute(start, end) == len(new)
        fresh |= new
        low = data.draw(st.integers(0, end))
        account.insert(low, end)
        written |= set(range(low, end)) & fresh
    assert parts(account) == (len(read), len(written), len(fresh - written))


def test_totals_sum_every_field_of_a_step_they_know():
    totals = StepTotals()
    record = StepRecord(*range(1, 1 + len(fields(StepRecord))))
    totals.add(record)
    totals.add(record)
    step = asdict(record)
    for name, value in asdict(totals).items():
        assert value == (2 if name == "num_steps" else 2 * step[name]), name
    not_summed = {
        "step",
        "num_seqs",
        "num_tokens",
        "num_batch_prefill_tokens",
        "num_batch_decode_tokens",
        "num_kv_tokens",
        "num_decode_seqs",
        "planned_at",
        "launched_at",
        "collected_at",
    }
    assert set(step) - set(asdict(totals)) == not_summed


def test_a_rate_approaches_tokens_per_busy_second():
    rate = Rate()
    assert rate.per_second == 0
    for _ in range(100):
        rate.add(50, 0.1)
    assert abs(rate.per_second - 500) < 1e-6
