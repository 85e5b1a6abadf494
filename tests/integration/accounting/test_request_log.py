"""The request log on both dialects: lists by every filter, pages without gaps, and what pruning keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sqlalchemy import event

from accounting.database.db import Database
from accounting.requests import request_log, request_log_pruning, request_volume, sessions
from accounting.requests.request_log import LoggedRequest, RequestFilter
from accounting.values.errors import InvalidError, NotFoundError

T0_MS = 1_790_000_000_000
DAY_MS = 86_400_000


def row(number: int, **fields: Any) -> LoggedRequest:
    """A request that was accepted `number` seconds after T0."""
    at_ms = fields.pop("at_ms", T0_MS + 1000 * number)
    defaults: dict[str, Any] = {
        "request_id": f"req_{at_ms:012x}7{number:019x}",
        "started_at_ms": at_ms,
        "tenant_id": "proj_a",
        "key_id": "key_a",
        "endpoint": "POST /v1/chat/completions",
        "model": "llama",
        "status": 200,
        "outcome": "ok",
        "trace_id": f"{number:032x}",
        "timeline": "[[],[],0]",
    }
    return LoggedRequest(**{**defaults, "is_tail": fields.get("outcome", "ok") != "ok", **fields})


def failed(number: int, **fields: Any) -> LoggedRequest:
    return row(number, **{"status": 500, "outcome": "server_error", "error_code": "internal", **fields})


async def write(db: Database, *rows: LoggedRequest) -> None:
    for start in range(0, len(rows), 500):
        async with db.write() as conn:
            await request_log.add(conn, rows[start : start + 500])


async def pages(db: Database, limit: int = 100, **wanted: Any) -> tuple[list[str], int]:
    """The ids of all pages, and the number of pages."""
    found: list[str] = []
    after, num_pages = None, 0
    while True:
        async with db.read() as conn:
            page = await request_log.list_requests(conn, RequestFilter(**wanted), after=after, limit=limit)
        found += [one.request_id for one in page.items]
        num_pages, after = num_pages + 1, page.next_after
        if after is None:
            return found, num_pages


async def prune(db: Database, now_ms: int = T0_MS + DAY_MS, max_rows: int = 10**6, max_days: int = 90) -> int:
    return await request_log_pruning.prune(db, now_ms, max_rows=max_rows, max_days=max_days)


async def test_a_row_comes_back_as_it_was_written(db: Database) -> None:
    written = row(
        1,
        end_user="maria \u2713 \\u0000 ' \" [b]",
        metadata={"team": "crops", "\u2713": "'; DROP TABLE request_log; --"},
        batch_id="batch_1",
        is_stream=True,
        prompt_tokens=2**40,
        charge=-5,
        currency="USD",
        ttft_ms=0,
        diverged_at_token=0,
        num_retries=2,
    )
    plain = row(2, ttft_ms=None, diverged_at_token=None, metadata=None)
    await write(db, written, plain)
    async with db.read() as conn:
        assert await request_log.get(conn, written.request_id) == written
        assert await request_log.get(conn, plain.request_id, "proj_a") == plain


async def test_a_batch_that_is_sent_again_changes_nothing(db: Database) -> None:
    await write(db, row(1), row(2))
    await write(db, row(2, status=500), row(3))
    assert (await pages(db))[0] == [row(n).request_id for n in (3, 2, 1)]
    async with db.read() as conn:
        assert (await request_log.get(conn, row(2).request_id)).status == 200


async def test_another_tenants_request_is_unknown(db: Database) -> None:
    await write(db, row(1), row(2, tenant_id="proj_b"))
    async with db.read() as conn:
        for wrong in (row(2).request_id, row(3).request_id, "", "x", "req_", "req_\0", "req_" + "f" * 99):
            with pytest.raises(NotFoundError):
                await request_log.get(conn, wrong, "proj_a")
    assert (await pages(db, tenant_id="proj_a"))[0] == [row(1).request_id]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({}, range(12)),
        ({"tenant_id": "proj_b"}, [1, 3, 5, 7, 9, 11]),
        ({"key_id": "key_2"}, [2, 5, 8, 11]),
        ({"model": "qwen"}, [0, 4, 8]),
        ({"tenant_id": "proj_b", "key_id": "key_2"}, [5, 11]),
        ({"tenant_id": "proj_a", "model": "qwen"}, [0, 4, 8]),
        ({"status_class": 5}, [0, 6]),
        ({"status_class": 4}, [3]),
        ({"status_class": 2}, [1, 2, 4, 5, 7, 8, 9, 10, 11]),
        ({"outcome": "refused"}, [3]),
        ({"outcome": "ok", "key_id": "key_1"}, [1, 4, 7, 10]),
        ({"tenant_id": "proj_b", "status_class": 5}, []),
        ({"since_ms": T0_MS + 3000, "until_ms": T0_MS + 5000}, [3, 4]),
        ({"until_ms": T0_MS + 1}, [0]),
        ({"min_duration_ms": 1000}, [10, 11]),
        ({"trace_id": f"{7:032x}"}, [7]),
        ({"trace_id": f"{7:032x}", "tenant_id": "proj_a"}, []),
        ({"request_id": row(5).request_id}, [5]),
        ({"request_id": row(5).request_id, "tenant_id": "proj_a"}, []),
        ({"request_id": "nothing"}, []),
        ({"batch_id": "batch_0"}, [0, 4, 8]),
        ({"batch_id": "batch_0", "tenant_id": "proj_b"}, []),
        ({"tier": "batch"}, [0, 4, 8]),
        ({"tier": "interactive", "key_id": "key_2"}, [2, 5, 11]),
        ({"end_user": "ann"}, [0, 5, 10]),
        ({"end_user": "ann", "tenant_id": "proj_a"}, [0, 10]),
        ({"end_user": "ann", "tenant_id": "proj_a", "tier": "batch"}, [0]),
        ({"error_code": "internal"}, [0, 6]),
        ({"error_code": "internal", "tenant_id": "proj_a", "batch_id": "batch_0"}, [0]),
        ({"error_code": "insufficient_quota", "outcome": "refused"}, [3]),
    ],
)
async def test_filters_find_theirs_in_order_page_by_page(
    db: Database, wanted: dict[str, Any], numbers: list[int]
) -> None:
    def made(n: int) -> LoggedRequest:
        fields: dict[str, Any] = {
            "tenant_id": "proj_b" if n % 2 else "proj_a",
            "key_id": f"key_{n % 3}",
            "model": "llama" if n % 4 else "qwen",
            "duration_ms": n * 100,
            "tier": "interactive" if n % 4 else "batch",
            "batch_id": None if n % 4 else "batch_0",
            "end_user": "" if n % 5 else "ann",
        }
        if n in (0, 6):
            return failed(n, **fields)
        refused = {"status": 429, "outcome": "refused", "error_code": "insufficient_quota"}
        return row(n, **fields, **(refused if n == 3 else {}))

    await write(db, *(made(n) for n in range(12)))
    for limit, most in ((1, max(1, len(numbers))), (100, 1)):
        found, num_pages = await pages(db, limit, **wanted)
        assert found == [row(n).request_id for n in sorted(numbers, reverse=True)]
        assert num_pages == most


async def test_a_page_looks_at_a_bounded_number_of_rows(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_SCANNED_ROWS", 10)
    rows = [row(n, duration_ms=n, is_tail=n % 2 == 0) for n in range(100)]
    await write(db, *rows)
    for wanted, most in (({"min_duration_ms": 0}, 10), ({"min_duration_ms": 0, "tenant_id": "proj_a"}, 20)):
        async with db.read() as conn:
            page = await request_log.list_requests(conn, RequestFilter(**wanted), limit=100)
        assert 10 <= len(page.items) <= most
        assert page.next_after is not None
    for wanted in ({}, {"tenant_id": "proj_a"}, {"model": "llama"}):
        found, _ = await pages(db, 7, min_duration_ms=3, **wanted)
        assert found == [one.request_id for one in reversed(rows[3:])]
        slowest, num_pages = await pages(db, 7, min_duration_ms=10**6, **wanted)
        assert slowest == []
        assert num_pages >= 5


@pytest.mark.parametrize("after", ["", "x", "req_'", "req_", "req_" + "f" * 33])
async def test_a_place_that_is_no_id_is_refused(db: Database, after: str) -> None:
    async with db.read() as conn:
        with pytest.raises(InvalidError):
            await request_log.list_requests(conn, RequestFilter(), after=after)


async def test_rows_beyond_their_age_go_failed_ones_too(db: Database) -> None:
    now_ms = T0_MS + 10 * DAY_MS
    old, young = now_ms - 3 * DAY_MS - 1, now_ms - 3 * DAY_MS
    await write(db, row(1, at_ms=old), failed(2, at_ms=old), row(3, at_ms=young), failed(4, at_ms=young))
    assert await prune(db, now_ms, max_days=3) == 2
    assert len((await pages(db))[0]) == 2
    assert await prune(db, now_ms, max_days=3) == 0


async def test_too_many_rows_leave_errors_and_slowest_last(db: Database) -> None:
    errors = [failed(n) for n in range(0, 2000, 40)]
    usual = [row(n, duration_ms=5_000 if n % 100 == 7 else n % 50) for n in range(2000) if n % 40]
    await write(db, *errors, *usual)
    await prune(db, max_rows=1000)
    left, _ = await pages(db)
    assert 900 <= len(left) <= 1000
    kept = set(left)
    assert all(one.request_id in kept for one in errors), "an error went before usual rows"
    gone = [one for one in usual if one.request_id not in kept]
    slow_gone = [one for one in gone if one.duration_ms == 5_000]
    assert slow_gone == [], "a slow request went before usual rows"
    assert len(gone) >= 1000
    assert usual[-1].request_id in kept


async def test_errors_alone_cannot_take_all_the_room(db: Database) -> None:
    usual = [row(n) for n in range(600)]
    await write(db, *usual, *(failed(n) for n in range(600, 2600)))
    await prune(db, max_rows=1000)
    left = set((await pages(db))[0])
    assert len(left) <= 1000
    assert sum(one.request_id in left for one in usual) >= 450


async def test_a_tenants_flood_pushes_out_nobody_elses_rows(db: Database) -> None:
    small = [row(n, tenant_id="proj_b") for n in range(100)]
    flood = [row(n, tenant_id="proj_a", status=429, outcome="refused") for n in range(100, 3100)]
    await write(db, *small, *flood)
    await prune(db, max_rows=1000)
    left = set((await pages(db))[0])
    assert all(one.request_id in left for one in small)
    assert len(left) <= 1000


async def test_gateways_that_prune_at_the_same_time_do_not_delete_twice(db: Database) -> None:
    await write(db, *(row(n) for n in range(1500)))
    await prune(db, max_rows=1000)
    before = await pages(db)
    assert await prune(db, max_rows=1000) == 0
    assert await pages(db) == before


async def test_the_volume_counts_per_bucket_and_no_more_rows_than_it_may(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(db, *(row(n) for n in range(10)), failed(3, request_id=f"req_{T0_MS + 3000:012x}8"), failed(20))
    wanted = RequestFilter(tenant_id="proj_a", since_ms=T0_MS, until_ms=T0_MS + 10_000)

    async def counted(**more: Any) -> tuple[list[tuple[int, int]], int]:
        async with db.read() as conn:
            found = await request_volume.volume(conn, msgspec.structs.replace(wanted, **more), 5)
        return found.counts, found.counted_from_ms

    assert await counted() == ([(2, 0), (3, 1), (2, 0), (2, 0), (2, 0)], T0_MS)
    assert await counted(tenant_id="proj_b") == ([(0, 0)] * 5, T0_MS)
    assert await counted(tenant_id=None, status_class=5) == ([(0, 0), (1, 1), (0, 0), (0, 0), (0, 0)], T0_MS)
    monkeypatch.setattr(request_volume, "MAX_COUNTED_ROWS", 4)
    assert await counted() == ([(0, 0), (0, 0), (0, 0), (2, 0), (2, 0)], T0_MS + 6000)
    with pytest.raises(InvalidError):
        await counted(until_ms=T0_MS)


async def test_a_session_is_listed_by_its_tenant_with_sums_of_the_newest_rows(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [row(n, session_id="talk", prompt_tokens=10 * n, cached_tokens=n, charge=n) for n in (1, 2, 4)]
    other = row(3, session_id="talk", tenant_id="proj_b", charge=9)
    # Nothing of what a refused request counted was computed.
    refused = failed(6, session_id="late", prompt_tokens=137)
    await write(db, *turns, other, row(5), refused, failed(7, session_id="late", prompt_tokens=10, charge=1))

    async def listed(**wanted: Any) -> tuple[list[tuple[str, str, int, int, int, int]], int | None]:
        async with db.read() as conn:
            found = await sessions.list_sessions(conn, RequestFilter(**wanted), 10)
        return [
            (one.session_id, one.tenant_id, one.num_requests, one.charge, one.prompt_tokens, one.cached_tokens)
            for one in found.items
        ], found.counted_from_ms

    talk_a, talk_b, late = (
        ("talk", "proj_a", 3, 7, 70, 7),
        ("talk", "proj_b", 1, 9, 0, 0),
        ("late", "proj_a", 2, 1, 10, 0),
    )
    assert await listed() == ([late, talk_a, talk_b], None)
    assert await listed(tenant_id="proj_a") == ([late, talk_a], None)
    assert await pages(db, tenant_id="proj_a", session_id="talk") == ([one.request_id for one in turns[::-1]], 1)
    assert await pages(db, tenant_id="proj_a", session_id="") == ([], 1)
    assert await pages(db, limit=2, tenant_id="proj_a", session_id="talk") == (
        [one.request_id for one in turns[::-1]],
        2,
    )
    async with db.read() as conn:
        mine = RequestFilter(tenant_id="proj_a", session_id="talk")
        assert await request_log.count_older(conn, mine, turns[2].request_id) == 2
        assert await request_log.count_older(conn, mine, turns[0].request_id) == 0
        with monkeypatch.context() as patch:
            patch.setattr(request_log, "MAX_SCANNED_ROWS", 1)
            assert await request_log.count_older(conn, mine, turns[2].request_id) is None
    with pytest.raises(InvalidError):
        await pages(db, session_id="talk")
    monkeypatch.setattr(sessions, "MAX_SCANNED_ROWS", 3)
    assert await listed(tenant_id="proj_a") == ([late, ("talk", "proj_a", 2, 6, 60, 6)], T0_MS + 2000)


async def test_a_session_has_an_entry_for_each_currency_and_refusals_are_in_one_of_them(db: Database) -> None:
    await write(
        db,
        row(1, session_id="talk", currency="EUR", charge=5),
        row(2, session_id="talk", currency="USD", charge=7),
        failed(3, session_id="talk", currency=""),
        row(4, session_id="dollars", currency="USD", charge=9),
        failed(5, session_id="dollars", currency=""),
        failed(6, session_id="refused", currency=""),
    )
    async with db.read() as conn:
        found = await sessions.list_sessions(conn, RequestFilter(tenant_id="proj_a"), 10)
    assert [(one.session_id, one.currency, one.num_requests, one.charge) for one in found.items] == [
        ("refused", "", 1, 0),
        ("dollars", "USD", 2, 9),
        ("talk", "USD", 2, 7),
        ("talk", "EUR", 1, 5),
    ]


async def test_the_requests_of_a_batch_and_of_an_end_user_have_an_index(db: Database) -> None:
    """So a page of a few of them among many requests is no search through the log."""
    await write(db, *(row(number) for number in range(400)))
    await write(db, *(row(400 + number, batch_id="batch_1", end_user="ann") for number in range(3)))
    async with db.write() as conn:
        await conn.exec_driver_sql("ANALYZE")
    statements: list[tuple[str, Any]] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: Any) -> None:
        statements.append((statement, parameters))

    for wanted, index in (
        ({"batch_id": "batch_1"}, "ix_request_log_batch_id"),
        ({"batch_id": "batch_1", "tenant_id": "proj_a"}, "ix_request_log_batch_id"),
        ({"end_user": "ann", "tenant_id": "proj_a"}, "ix_request_log_end_user"),
    ):
        statements.clear()
        async with db.read() as conn:
            event.listen(conn.sync_connection, "before_cursor_execute", note)
            assert len((await request_log.list_requests(conn, RequestFilter(**wanted))).items) == 3
            event.remove(conn.sync_connection, "before_cursor_execute", note)
            if db.dialect == "sqlite":
                statement, parameters = statements[-1]
                plan = [one[3] for one in await conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
                assert any(index in step for step in plan), plan


async def test_sums_of_sessions_read_the_newest_rows_and_no_index_of_all(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the page of sessions takes no longer when the log grows."""
    await write(db, *(row(number, session_id=f"talk-{number % 7}") for number in range(400)))
    async with db.write() as conn:
        await conn.exec_driver_sql("ANALYZE")
    monkeypatch.setattr(sessions, "MAX_SCANNED_ROWS", 3)
    statements: list[tuple[str, Any]] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: Any) -> None:
        statements.append((statement, parameters))

    async with db.read() as conn:
        event.listen(conn.sync_connection, "before_cursor_execute", note)
        for wanted in ({}, {"tenant_id": "proj_a"}, {"model": "llama"}):
            await sessions.list_sessions(conn, RequestFilter(**wanted), 10)
        event.remove(conn.sync_connection, "before_cursor_execute", note)
        assert "session_id" in statements[-1][0]
        if db.dialect == "sqlite":
            for statement, parameters in statements:
                plan = [one[3] for one in await conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
                assert not any("ix_request_log_session_id" in step for step in plan), plan
