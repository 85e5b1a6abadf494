"""The twins of KV and attention kernels against their definition in float64. Unread slots hold NaN."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from kernels import dispatch
from kernels.arguments.batch import PagedBatch, Slots

OPS = dispatch.choose(torch.device("cpu"))
BLOCK_SIZE, NUM_BLOCKS = 4, 40


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    """Rows with random K, V and queries, the K and V scattered over random blocks of a NaN-filled layer."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        kv_heads: int = 2,
        groups: int = 3,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(query_lens) + 100 * sum(context_lens))
        free = list(range(1, NUM_BLOCKS))
        random.Random(len(query_lens)).shuffle(free)
        self.kv = torch.full((NUM_BLOCKS, 2, kv_heads, BLOCK_SIZE, head_dim), float("nan"), dtype=dtype)
        self.keys, self.values, tables = [], [], []
        for query_len, context_len in zip(query_lens, context_lens, strict=True):
            length = query_len + context_len
            table, free = free[: -(-length // BLOCK_SIZE)], free[-(-length // BLOCK_SIZE) :]
            key, value = torch.randn((2, length, kv_heads, head_dim), generator=generator, dtype=torch.float64).to(
                dtype
            )
            slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)]
            OPS.kv_write(self.kv, key, value, Slots(torch.tensor(slots), BLOCK_SIZE))
            self.keys.append(key)
            self.values.append(value)
            tables.append(torch.tensor(table))
        self.batch = PagedBatch(query_lens, context_lens, tables, BLOCK_SIZE)
        self.query = torch.randn(
            (sum(query_lens), kv_heads * groups, head_dim), generator=generator, dtype=torch.float64
        ).to(dtype)

    def expected(self, scale: float, window: int, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
        """Row by row, query by query, head by head, in float64."""
        out = torch.empty(self.query.shape, dtype=torch.float64)
        groups = self.query.shape[1] // self.kv.shape[2]
        for row, (start, context) in enumerate(zip(self.batch.starts[:-1], self.batch.context_lens, strict=True)):
            for index, head in itertools.product(range(self.batch.query_lens[row]), range(self.query.shape[1])):
                position = context + index
                first = max(0, position + 1 - window) if window else 0
                key = self.keys[row][first : position + 1, head // groups].double()
                value = self.values[row][first : position + 1, head // groups].double()
                scores = key @ self.query[start + index, head].double() * scale
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = scores.softmax(0)[: len(value)]
                out[start + index, head] = weights @ value
        return out


FEATURES = [
    {},
    {"window": 1},
    {"window": 5},
    {"window": 8},
    {"softcap": 3.0},
    {"sinks": torch.linspace(-1, 2, 6)},
    {"window": 6, "softcap": 2.0, "sinks": torch.linspace(-2, 1, 6)},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_decode_equals_its_definition(features: dict[str, object]) -> None:
    case = Case([1] * 9, [0, 1, 2, 3, 4, 7, 8, 15, 30])
    how = {"window": 0, "softcap": 0.0, "sinks": None} | features
    out = torch.full_like(case.query, float("nan"))
    OPS.attention_decode(out, case.query, case.kv, case.batch, 0.3, **how)
    torch.testing.assert_close(out.double(), case.expected(0.3, **how), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_prefill_equals_its_definition(features: dict[str, object]) -> None:
    case = Case([3, 1, 4, 9, 5, 2], [0, 0, 4, 0, 13, 27])
    how = {"window": 0, "softcap": 0.0, "sinks": None} | features
    out = torch.full_like(case.query, float("nan"))
    OPS.attention_prefill(out, case.query, case.kv, case.batch, 0.3, **how)
    torch.testing.assert_close(out.double(), case.expected(0.3, **how), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_own_rounding(dtype: torch.dtype) -> None:
    decode = Case([1, 1], [9, 22], dtype=dtype)
    prefill = Case([6, 9], [9, 0], dtype=dtype)
    out = torch.empty_like(decode.query)
    OPS.attention_decode(out, decode.query, decode.kv, decode.batch, 0.25)
    expected = decode.expected(0.25, 0, 0.0, None)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    out = torch.empty_like(prefill.query)
    OPS.attention_prefill(out, prefill.query, prefill.kv, prefill.batch, 0.25)
    expected = prefill.expected(0.25, 0, 0.0, None)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (4, 1), (1, 7), (2, 8)])
def test_any_number_of_query_heads_per_kv_head(kv_heads: int, groups: int) -> None:
    case = Case([1, 1], [5, 6], kv_heads, groups)
    out = torch.empty_like(case.query)
    OPS.attention_decode(out, case.query, case.kv, case.batch, 0.5)
    expected = case.expected(0.5, 0, 0.0, None)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_slot_of_minus_one_is_written_nowhere() -> None:
    kv = torch.zeros((3, 2, 1, BLOCK_SIZE, 16))
    tokens = torch.ones((3, 1, 16))
    OPS.kv_write(kv, tokens, 2 * tokens, Slots(torch.tensor([-1, 5, -1]), BLOCK_SIZE))
    assert kv[1, 0, 0, 1].tolist() == [1.0] * 16
    assert kv[1, 1, 0, 1].tolist() == [2.0] * 16
    assert kv.sum().item() == 16 + 32


def test_block_copy_copies_every_layer_and_nothing_else() -> None:
    kv = torch.randn((2, 6, 2, 1, BLOCK_SIZE, 16))
    before = kv.clone()
    OPS.block_copy(kv, torch.tensor([1, 2]), torch.tensor([4, 5]))
    assert torch.equal(kv[:, :4], before[:, :4])
    assert torch.equal(kv[:, 4:6], before[:, 1:3])
    OPS.block_copy(kv, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"query": torch.zeros(1, 4, 32)},
        {"query": torch.zeros(1, 3, 16)},
        {"query": torch.zeros(1, 4, 16, dtype=torch.float16)},
        {"kv": torch.zeros(3, 2, 2, 16, BLOCK_SIZE).transpose(3, 4)},
        {"kv": torch.zeros(3, 2, 2, 8, 16)},
        {"kv": torch.zeros(3, 2, 2, BLOCK_SIZE, 24)},
    ],
)
def test_an_op_refuses_what_its_kernel_does_not_expect(wrong: dict[str, torch.Tensor]) -> None:
    given = {"query": torch.zeros(1, 4, 16), "kv": torch.zeros(3, 2, 2, BLOCK_SIZE, 16)} | wrong
    batch = PagedBatch([1], [0], [torch.tensor([1])], BLOCK_SIZE)
    with pytest.raises(AssertionError):
        OPS.attention_decode(torch.empty_like(given["query"]), given["query"], given["kv"], batch, 1.0)
