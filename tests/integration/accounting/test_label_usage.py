"""Sums by end user and by metadata on both dialects: each request is in them once, and their number is bounded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from sqlalchemy import event

from accounting.anomalies import end_users
from accounting.database.db import Database
from accounting.requests import label_usage, request_log, request_log_pruning
from accounting.requests.label_usage import LabelFilter, LabelSum
from accounting.requests.request_log import LoggedRequest

DAY_MS = 86_400_000
T0_MS = 20_000 * DAY_MS
NUMBERS = itertools.count(100_000)
EVERYTHING: dict[str, Any] = {"tenant_id": "proj_a", "since_ms": 0, "until_ms": 2**45}


def row(number: int, *, days: int = 0, **fields: Any) -> LoggedRequest:
    at_ms = T0_MS + days * DAY_MS + number
    defaults: dict[str, Any] = {
        "request_id": f"req_{at_ms:012x}7{number:019x}",
        "is_tail": False,
        "started_at_ms": at_ms,
        "tenant_id": "proj_a",
        "key_id": "key_a",
        "endpoint": "POST /v1/chat/completions",
        "model": "llama",
        "status": 200,
        "outcome": "ok",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 2,
        "charge": 100,
        "currency": "USD",
    }
    return LoggedRequest(**{**defaults, **fields})


async def write(db: Database, *rows: LoggedRequest) -> None:
    async with db.write() as conn:
        await label_usage.note(conn, rows)
        await request_log.add(conn, rows)


async def sums(db: Database, label: str = "end_user", **wanted: Any) -> Sequence[LabelSum]:
    async with db.read() as conn:
        return await label_usage.list_sums(conn, LabelFilter(**{**EVERYTHING, "label": label, **wanted}), 5000)


async def charges(db: Database, label: str = "end_user", **wanted: Any) -> dict[str, int]:
    return {one.value: one.charge for one in await sums(db, label, **wanted)}


async def test_requests_are_summed_by_end_user_and_by_each_field_of_their_metadata(db: Database) -> None:
    await write(
        db,
        row(1, end_user="maria", metadata={"team": "crops", "stage": "test"}),
        row(2, end_user="maria", metadata={"team": "soil"}),
        row(3, end_user="jo", charge=7),
        row(4, metadata={"team": "crops"}, tenant_id="proj_b"),
        row(5),
    )
    maria, jo = await sums(db)
    assert (maria.value, maria.num_requests, maria.charge, maria.prompt_tokens) == ("maria", 2, 200, 20)
    assert (maria.cached_tokens, maria.output_tokens, maria.currency) == (8, 4, "USD")
    assert (jo.value, jo.charge) == ("jo", 7)
    assert await charges(db, "metadata.team") == {"crops": 100, "soil": 100}
    assert [one.tenant_id for one in await sums(db, "metadata.team", tenant_id=None)].count("proj_b") == 1
    async with db.read() as conn:
        labels = await label_usage.list_labels(conn, LabelFilter(**EVERYTHING))
    assert labels == ["end_user", "metadata.stage", "metadata.team"]


async def test_a_batch_of_rows_that_is_sent_again_is_not_counted_again(db: Database) -> None:
    rows = [row(number, end_user="maria") for number in range(5)]
    await write(db, *rows[:3])
    await write(db, *rows)
    assert await charges(db) == {"maria": 500}


async def test_refused_requests_are_in_no_sum(db: Database) -> None:
    await write(db, row(1, end_user="maria", status=429, outcome="refused", currency="", charge=0))
    assert await charges(db) == {}


async def test_currencies_are_never_added(db: Database) -> None:
    await write(db, row(1, end_user="maria"), row(2, end_user="maria", currency="EUR", charge=5))
    assert [(one.currency, one.charge) for one in await sums(db)] == [("USD", 100), ("EUR", 5)]


async def test_days_and_models_are_chosen(db: Database) -> None:
    await write(db, *(row(1, days=day, end_user="maria", charge=10**day) for day in range(3)))
    await write(db, row(2, end_user="maria", model="qwen", charge=7))
    assert await charges(db, since_ms=T0_MS + DAY_MS, until_ms=T0_MS + 2 * DAY_MS) == {"maria": 10}
    assert await charges(db, model="qwen") == {"maria": 7}


async def test_a_client_that_invents_values_fills_its_own_day_and_loses_no_amount(db: Database) -> None:
    most = label_usage.MAX_SUMS
    await write(db, *(row(number, end_user=f"user {number}") for number in range(most - 1)))
    await write(db, *(row(number, end_user=f"user {number}") for number in range(most - 10, most + 90)))
    await write(db, row(9001, end_user="maria", tenant_id="proj_b"), row(2, days=1, end_user="maria"))
    await write(db, row(9002, end_user="user 3"))
    found = await charges(db, until_ms=T0_MS + DAY_MS)
    assert len(found) == most + 1
    assert found[""] == 100 * 90
    assert sum(found.values()) == 100 * (most + 91)
    assert found["user 3"] == 200, "a sum that exists goes on"
    assert await charges(db, tenant_id="proj_b") == {"maria": 100}
    assert await charges(db, since_ms=T0_MS + DAY_MS) == {"maria": 100}


async def test_the_sums_of_a_day_are_counted_without_the_other_days(db: Database) -> None:
    """A tenant may have two thousand sums on each of ninety days, and postings wait for the transaction that counts."""
    statements: list[tuple[str, Any]] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: Any) -> None:
        statements.append((statement, parameters))

    async with db.write() as conn:
        event.listen(conn.sync_connection, "before_cursor_execute", note)
        await label_usage.note(conn, [row(1, end_user="maria")])
        event.remove(conn.sync_connection, "before_cursor_execute", note)
        [(counts, parameters)] = [one for one in statements if "count(*)" in one[0]]
        if db.dialect == "sqlite":
            plan = [one[3] for one in await conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {counts}", parameters)]
            assert all("tenant_id=? AND day_ms=?" in step for step in plan), plan


async def test_old_days_are_deleted_with_the_log(db: Database) -> None:
    await write(db, row(1, end_user="maria"), row(2, days=5, end_user="maria", charge=7))
    await request_log_pruning.prune(db, T0_MS + 6 * DAY_MS, max_rows=10**6, max_days=3)
    assert await charges(db) == {"maria": 7}


def days_of(user: str, per_day: Sequence[int], **fields: Any) -> list[LoggedRequest]:
    """Requests of an end user by day, the last of which is day 28."""
    first = 29 - len(per_day)
    return [
        row(next(NUMBERS), days=first + day, end_user=user, **fields)
        for day, count in enumerate(per_day)
        for _ in range(count)
    ]


async def unusual(db: Database, tenant_id: str | None = None) -> dict[str, tuple[int, int]]:
    """Each unusual end user's requests today and on its usual day."""
    async with db.read() as conn:
        found = await end_users.find(conn, T0_MS + 28 * DAY_MS + 1000, tenant_id)
    return {one.end_user: (one.num_requests, one.requests.usual) for one in found}


async def test_an_end_user_whose_day_is_far_above_its_own_past_is_found(db: Database) -> None:
    await write(db, *days_of("maria", [4] * 10 + [50]), *days_of("steady", [40] * 12), *days_of("young", [1, 99]))
    await write(db, *days_of("few", [1] * 10 + [30]), *days_of("dear ", [2] * 10 + [2], charge=90_000))
    assert await unusual(db) == {"maria": (50, 4)}
    await write(db, *days_of("dear  ", [2] * 10), row(next(NUMBERS), days=28, end_user="dear  ", charge=900_000))
    assert list(await unusual(db)) == ["dear  ", "maria"], "the highest charge comes first"
    assert await unusual(db, "proj_b") == {}


async def test_days_tell_the_named_values_one_by_one_and_all_others_together(db: Database) -> None:
    await write(
        db,
        row(1, end_user="maria"),
        row(2, end_user="maria", charge=50),
        row(3, end_user="jo", days=1),
        row(4, end_user="ada", days=1, charge=7),
        row(5, end_user="eve", days=1, charge=3),
        row(6, end_user="eve", days=1, charge=3, tenant_id="proj_b"),
    )
    async with db.read() as conn:
        wanted = LabelFilter(**EVERYTHING)
        days = await label_usage.list_days(conn, wanted, ["maria", "jo"])
        found = {((one.day_ms - T0_MS) // DAY_MS, one.value): (one.num_requests, one.charge) for one in days}
        assert found == {(0, "maria"): (2, 150), (1, "jo"): (1, 100), (1, None): (2, 10)}
        assert await label_usage.list_days(conn, LabelFilter(**EVERYTHING | {"until_ms": T0_MS}), ["maria"]) == []
