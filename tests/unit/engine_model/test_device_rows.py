"""The mirror sends what differs and nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from workers.engine.device.device_rows import Delta, Field, Mirror, RowStore, draw_tensors
from workers.engine.device.graphs import bucket_sizes
from workers.engine.device.mixed_step import MixedTensors, mix
from workers.engine.kv.transport import upload
from workers.engine.values.plan import PENDING, Row, SampleSpec
from workers.protocol.messages import SamplingParams

PARAMS = SamplingParams(seed=2**63 + 5, temperature=0.7, top_p=0.25, min_p=0.125, top_k=2**40)


def row(tokens: list[int], start: int, table: list[int], row_id: int) -> Row:
    draw = SampleSpec(PARAMS, PARAMS.seed, start + len(tokens), (), ())
    return Row(tokens, start, table, (draw,), row_id=row_id)


def sent(mirror: Mirror, rows: list[Row]) -> Delta:
    delta = mirror.diff(rows)
    mirror.commit(delta)
    return delta


def test_a_row_that_only_goes_on_sends_nothing() -> None:
    mirror, table = Mirror(4, 8), [5, 6]
    sent(mirror, [row([1, 2, 3], 0, table, 2)])
    mirror.advance([2])
    delta = sent(mirror, [row([PENDING], 3, table, 2)])
    assert [len(part) for part in delta.parts()] == [0, 0, 0, 0]


def test_a_table_that_grew_sends_its_new_end_and_another_list_what_differs() -> None:
    mirror, table = Mirror(4, 8), [5]
    first = sent(mirror, [row([1, 2, 3], 0, table, 2)])
    assert (list(first.places), list(first.blocks)) == ([16], [5])
    mirror.advance([2])
    table.append(9)
    grown = sent(mirror, [row([PENDING], 3, table, 2)])
    assert (list(grown.rows), list(grown.places), list(grown.blocks)) == ([], [17], [9])
    mirror.advance([2])
    other = sent(mirror, [row([PENDING], 4, [5, 7, 3], 2)])
    assert (list(other.places), list(other.blocks)) == ([17, 18], [7, 3])


def test_a_step_that_failed_before_its_commit_is_sent_again() -> None:
    mirror = Mirror(4, 8)
    step = [row([1, 2], 0, [3], 0)]
    lost = mirror.diff(step)
    assert mirror.diff(step).parts() == lost.parts()


def test_a_pending_token_of_a_row_that_nobody_had_is_our_mistake() -> None:
    mirror = Mirror(4, 8)
    with pytest.raises(AssertionError, match="pending token of nobody"):
        mirror.diff([row([PENDING], 3, [1], 0)])
    sent(mirror, [row([1, 2, 3], 0, [1], 0)])
    with pytest.raises(AssertionError, match="pending token of nobody"):
        mirror.diff([row([PENDING], 3, [1], 0)])  # nothing was drawn for it


def test_the_device_holds_what_the_rows_said() -> None:
    """Random changes of tables, rows that come and go; the tensors are compared with a model of them."""
    rng = random.Random(4)
    mirror, store = Mirror(5, 6), RowStore(5, 6, torch.device("cpu"))
    expected: dict[int, tuple[int, int, list[int]]] = {}
    for _ in range(200):
        chosen = rng.sample(range(5), rng.randint(1, 5))
        rows = []
        for row_id in chosen:
            table = [rng.randint(1, 9) for _ in range(rng.randint(1, 6))]
            if row_id in expected and rng.random() < 0.5:
                table = [*expected[row_id][2][: rng.randint(1, 6)], 7]
                table = table[:6]
            token, start = rng.randint(0, 99), rng.randint(0, 30)
            rows.append(row([token], start, table, row_id))
            expected[row_id] = (token, start, table)
        delta = sent(mirror, rows)
        store.apply(*upload(torch.device("cpu"), *delta.parts()))
        for row_id, (token, start, table) in expected.items():
            assert store.rows.last_tokens[row_id] == token
            assert store.rows.positions[row_id] == start
            assert store.block_table[row_id, : len(table)].tolist() == table


def test_sampling_numbers_arrive_as_they_were() -> None:
    mirror, store = Mirror(4, 8), RowStore(4, 8, torch.device("cpu"))
    delta = sent(mirror, [row([1], 0, [3], 1)])
    store.apply(*upload(torch.device("cpu"), *delta.parts()))
    draws = draw_tensors(store.state[Field.TEMPERATURE :, 1:2], torch.tensor([8]))
    assert draws.temperature.item() == torch.tensor(0.7).item()
    assert (draws.top_p.item(), draws.min_p.item()) == (0.25, 0.125)
    assert draws.top_k.item() == 2**31 - 1  # more than any vocabulary: off
    assert draws.seeds.tolist() == [[5, 2**31]]


@pytest.mark.parametrize("number", [1, 3, 4, 7])
def test_numbers_of_a_mixed_step_begin_where_compiled_kernels_want_them(number: int) -> None:
    step = mix([row([1, 2], 0, [3], row_id) for row_id in range(number)], 16)
    tensors = MixedTensors(*upload(torch.device("cpu"), *step.parts()))
    draws = tensors.draws()
    for line in (draws.temperature, draws.top_p, draws.min_p):
        assert line.is_contiguous() and line.storage_offset() % 4 == 0
    assert draws.top_p.tolist() == [0.25] * number
    assert draws.positions.tolist() == [2] * number


@pytest.mark.parametrize(
    ("max_rows", "smallest", "sizes"),
    [
        (1, 1, [1]),
        (3, 1, [1, 2, 3]),
        (16, 1, [1, 2, 4, 8, 16]),
        (17, 1, [1, 2, 4, 8, 16, 17]),
        (70, 1, [1, 2, 4, 8, 16, 32, 48, 64, 70]),
        (40, 4, [4, 8, 16, 32, 40]),
        (2, 4, [4]),
    ],
)
def test_buckets_are_powers_of_two_and_then_steps_of_16(max_rows: int, smallest: int, sizes: list[int]) -> None:
    assert bucket_sizes(max_rows, smallest) == sizes
