"""A device that answers one step late, made of any runner with lag 0, and a referee of what the engine asks of it.

Steps and copies queue up and run when a ticket is collected, as late as a device may. A pending token is what the
device row drew itself; the host's word is not asked for. Broken rules raise in `launch` or `allocated`: two sequences on
one device row, a block handed out or written while a launched step of another sequence uses it, a row that goes on
from nothing, a step launched before one it depends on was collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from workers.engine.values.errors import DeviceOutOfMemory
from workers.engine.values.layout import Tree
from workers.engine.values.plan import PENDING, Row, RowResult, SampledToken
from workers.engine.values.token_tree import positions

GARBAGE = -7
"""Drawn by rows that were built on a failed step: nobody may ever see it."""


@dataclass(eq=False)
class LaggedTicket:
    runner: LaggedRunner
    rows: list[Row]
    given: list[Row]
    """The rows as the engine handed them over, with lists that are still alive."""
    failure: Exception | None = None
    garbage: set[int] = field(default_factory=set)
    """Device rows whose step before failed."""
    results: list[RowResult] | None = None

    @property
    def row_ids(self) -> dict[int, Row]:
        return {row.row_id: row for row in self.rows}

    @property
    def stands_alone(self) -> bool:
        return any(len(row.draws) > 1 or row.prompt_logprobs >= 0 for row in self.rows)

    def collect(self) -> list[RowResult]:
        return self.runner.collect(self)


class LaggedRunner:
    """`max_step_tokens`: a larger step does not fit the device, and says so in `launch` or, `late`, in `collect`."""

    def __init__(
        self, inner, max_running: int, *, lag: int = 1, max_step_tokens: int | None = None, late: bool = False
    ) -> None:
        self.inner = inner
        self.lag = lag
        self.max_step_tokens = max_step_tokens
        self.fail_launch: Exception | None = None
        self.fail_collect: Exception | None = None
        """The errors of the step that is launched next."""
        self.num_launched = self.num_late = self.num_out_of_memory = self.num_tokens = 0
        """Tokens of steps that ran."""
        self._late = late
        self._max_running = max_running
        self._queue: deque[LaggedTicket | Callable[[], None]] = deque()
        self._uncollected: deque[LaggedTicket] = deque()
        self._last: LaggedTicket | None = None
        self._drawn: dict[int, int] = {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def fail_next(self) -> Exception | None:
        return self.inner.fail_next

    @fail_next.setter
    def fail_next(self, failure: Exception | None) -> None:
        """The next step that runs raises this when it is collected."""
        self.inner.fail_next = failure

    # --- what the engine calls ---

    def launch(self, rows: Sequence[Row]) -> LaggedTicket:
        assert rows, "an empty step"
        assert len(self._uncollected) <= self.lag, "more steps in flight than the lag allows"
        if self._uncollected:
            assert not self._uncollected[-1].stands_alone, "launched before its forks were known"
        num_tokens = sum(len(row.tokens) for row in rows)
        failure, self.fail_launch = self.fail_launch, None
        too_large = self.max_step_tokens is not None and num_tokens > self.max_step_tokens
        if too_large:
            self.num_out_of_memory += 1
            if not self._late:
                failure = DeviceOutOfMemory(f"{num_tokens} tokens")
        self._check_rows(rows)
        if failure is not None:
            raise failure
        ticket = LaggedTicket(self, [_frozen(row) for row in rows], list(rows), self.fail_collect)
        self.fail_collect = None
        if too_large:
            ticket.failure = DeviceOutOfMemory(f"{num_tokens} tokens")
        self.num_launched += 1
        self.num_late += bool(self._uncollected)
        self._uncollected.append(ticket)
        self._queue.append(ticket)
        self._last = ticket
        return ticket

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pairs = list(pairs)
        assert not {s for s, _ in pairs} & {d for _, d in pairs}, "a chain of copies"
        self._check_unused(destination for _, destination in pairs)
        self._queue.append(lambda: self.inner.copy_blocks(pairs))

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        assert not self._uncollected, "moved while a step is in flight"
        self.inner.move_tokens(moves)

    def collect(self, ticket: LaggedTicket) -> list[RowResult]:
        assert self._uncollected.popleft() is ticket, "collected out of order"
        self.settle()
        assert self._queue.popleft() is ticket
        if ticket.failure is not None:
            self._fail(ticket)
            raise ticket.failure
        try:
            results = self._run(ticket)
        except Exception:
            self._fail(ticket)
            raise
        self.num_tokens += sum(len(row.tokens) for row in ticket.rows)
        return results

    # --- what a test calls ---

    def settle(self) -> None:
        """Copies that no launched step stands before, also those of a step that did not fit: whoever reads blocks from
        now on reads behind them, as on one stream of a device."""
        while self._queue and not isinstance(self._queue[0], LaggedTicket):
            self._queue.popleft()()

    def allocated(self, block_ids: Iterable[int] | None) -> None:
        """The cache hands these out."""
        self._check_unused(block_ids or ())

    def published(self, tokens, block_ids, num_committed: int) -> None:
        """Told by `watch`; only a scripted model shows its KV."""
        kv, size = getattr(self.inner, "_kv", None), self.inner.block_size
        for index in range(num_committed // size if kv else 0):
            found = list(kv[block_ids[index]])
            assert found == list(tokens[index * size : (index + 1) * size]), "published too early"

    def used_blocks(self) -> set[int]:
        return {block for ticket in self._uncollected for row in ticket.rows for block in row.block_table}

    @property
    def row_ids_in_flight(self) -> set[int]:
        return {row.row_id for ticket in self._uncollected for row in ticket.rows}

    # --- the device ---

    def _run(self, ticket: LaggedTicket) -> list[RowResult]:
        sound = [row for row in ticket.rows if row.row_id not in ticket.garbage]
        found = iter(self.inner.execute([self._resolved(row) for row in sound]) if sound else ())
        results = []
        for row in ticket.rows:
            if row.row_id in ticket.garbage:
                results.append(RowResult(tuple(SampledToken(GARBAGE) for _ in row.draws)))
                continue
            result = next(found)
            results.append(result)
            self._drawn.pop(row.row_id, None)
            if len(row.draws) == 1:
                self._drawn[row.row_id] = result.drawn[0].token
        return results

    def _resolved(self, row: Row) -> Row:
        if row.tokens[-1] != PENDING:
            return row
        token = self._drawn[row.row_id]
        draws = tuple(replace(draw, output=[*draw.output, token]) for draw in row.draws)
        return replace(row, tokens=[*row.tokens[:-1], token], draws=draws)

    def _fail(self, ticket: LaggedTicket) -> None:
        for later in self._uncollected:
            later.garbage |= set(ticket.row_ids) | ticket.garbage

    # --- the referee ---

    def _check_rows(self, rows: Sequence[Row]) -> None:
        ids = [row.row_id for row in rows]
        assert len(set(ids)) == len(ids), "two sequences on one device row"
        assert all(0 <= row_id < self._max_running for row_id in ids)
        written: set[int] = set()
        for row in rows:
            assert PENDING not in row.tokens[:-1]
            if row.tokens[-1] == PENDING:
                self._check_goes_on(row)
            else:
                self._check_own_row(row)
            mine = set(self._written(row))
            assert not mine & written, "two rows write one block"
            written |= mine
            for ticket in self._uncollected:
                for other in ticket.rows:
                    shared = other.row_id != row.row_id and mine & set(other.block_table)
                    assert not shared, "a block is written that another launched row uses"

    def _written(self, row: Row) -> list[int]:
        size = self.inner.block_size
        end = row.kv_start + len(row.tokens)
        return list(row.block_table[row.kv_start // size : -(-end // size)])

    def _check_goes_on(self, row: Row) -> None:
        assert self._uncollected and self._uncollected[-1] is self._last, "its token is known"
        place = [r.row_id for r in self._last.rows].index(row.row_id)
        before, given = self._last.rows[place], self._last.given[place]
        assert len(before.draws) == 1, "nothing was drawn there"
        assert row.start == before.start + len(before.tokens)
        assert len(row.draws) == 1 and row.draws[0].params is before.draws[0].params
        assert row.draws[0].seed == before.draws[0].seed
        assert row.draws[0].position == before.draws[0].position + 1 == row.start + 1
        known = len(row.draws[0].prompt) + len(row.draws[0].output)
        assert known == row.draws[0].position - 1, "the pending token is among the output"
        if row.block_table is given.block_table:
            assert tuple(row.block_table[: len(before.block_table)]) == before.block_table

    def _check_own_row(self, row: Row) -> None:
        """Checks a row that is in flight already: it is then a prefill of the same sequence that goes on."""
        if row.num_proposed:
            assert len(row.draws) == row.num_proposed + 1 == len(row.tokens)
            assert not any(row.row_id in ticket.row_ids for ticket in self._uncollected)
        parents = row.layout.parents if isinstance(row.layout, Tree) else range(-1, row.num_proposed - 1)
        if row.layout is not None:
            assert len(row.tokens) == row.num_proposed + 1 == len(parents) + 1
        depths = [place - 1 for place in positions(1, parents)]
        for place, draw in enumerate(row.draws):
            known = row.start + len(row.tokens) - row.num_proposed
            assert draw.position == known + (depths[place] if row.num_proposed else 0)
        for ticket in self._uncollected:
            if (before := ticket.row_ids.get(row.row_id)) is not None:
                assert not before.draws, "its token is pending, or the row has a new owner too early"
                assert row.start == before.start + len(before.tokens), "a row has a new owner too early"

    def _check_unused(self, block_ids: Iterable[int]) -> None:
        used = self.used_blocks()
        for block in block_ids:
            assert block not in used, f"block {block} is handed out while a launched step uses it"


def _frozen(row: Row) -> Row:
    draws = tuple(replace(draw, output=list(draw.output)) for draw in row.draws)
    return replace(row, tokens=list(row.tokens), block_table=tuple(row.block_table), draws=draws)


def watch(cache, runner: LaggedRunner) -> None:
    """Every block that the cache hands out passes the referee, and so does every block that enters the tree: its KV is
    written already, with the tokens the tree is told."""
    allocate, commit = cache.allocate, cache.commit

    def allocated(n, **options):
        blocks = allocate(n, **options)
        runner.allocated(blocks)
        return blocks

    def committed(handle, tokens, block_ids, num_committed, **options):
        runner.published(tokens, block_ids, num_committed)
        return commit(handle, tokens, block_ids, num_committed, **options)

    cache.allocate, cache.commit = allocated, committed
