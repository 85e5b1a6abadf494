"""Idempotency-Keys in SQL: a key is running, or it has the stored answer with the posting that pays for it (metering.md
14).

The answer is stored before it is settled, so a crash in between is repaired from here: a stored answer is delivered and
charged, and a key that was closed before its answer came is neither. The module knows no HTTP, and of batches only
their ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec
from sqlalchemy import delete, func, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches.claims import now_ms
from accounting.database.db import among, upsert
from accounting.tables.batch_models import Batch, BatchLine
from accounting.tables.batch_models import IdempotentReply as Reply
from accounting.tables.idempotency_models import IdempotentPosting
from accounting.tables.models import LedgerEntry
from accounting.values.errors import AccountingError
from accounting.values.types import Posting

KEEP_S = 86_400
MAX_KEYS, MAX_BYTES = 10_000, 256 * 1024 * 1024
"""Bounds for one tenant, not counting batch lines. Beyond them a new key is refused, and no answer is dropped early."""
RUNNING_BYTES = 64 * 1024
"""Bytes that are reserved for an answer that does not exist yet."""
PURGED_AT_ONCE = 500

# Indexes have these conditions. A database uses one where the statement itself has the state, and no parameter.
_IS_STORED = Reply.state == literal_column("'stored'")
_IS_RUNNING = Reply.state == literal_column("'running'")


def line_key(batch_id: str, line_no: int) -> str:
    """Returns the Idempotency-Key of a batch line. The stored texts of the line are bound to this name when they are
    encrypted."""
    return f"batch:{batch_id}:{line_no}"


class KeyClosed(AccountingError):
    """The batch line of the key has ended, or its batch runs no lines."""


class NoRoom(AccountingError):
    """The tenant has as many keys, or bytes of answers, as it may have."""

    def __init__(self, what: Literal["keys", "bytes"], limit: int, used: int, until: int) -> None:
        super().__init__(f"No more {what} of stored answers.")
        self.what = what
        self.limit = limit
        self.used = used
        self.until = until
        """Unix second at which the oldest answer ends."""


class Stored(msgspec.Struct, frozen=True):
    request_id: str
    status: int
    body: bytes
    """The answer, encrypted by the caller and bound to the key."""
    posting: Posting | None
    """The value is None for the answer of a request that creates something and costs nothing."""
    content_type: str | None = None
    """The value is None for JSON."""


class Known(msgspec.Struct, frozen=True):
    """The state of a key that is taken. A caller whose `fingerprint` differs sent another request. `stored` is there if
    the request has ended."""

    fingerprint: bytes
    stored: Stored | None


async def take(
    conn: AsyncConnection,
    tenant_id: str,
    key: str,
    *,
    fingerprint: bytes,
    request_id: str,
    slot: int,
    now: int,
    line: tuple[str, int] | None = None,
) -> Known | None:
    """Takes the key. Returns None if the caller has it now: one of `store` and `drop` must follow. `line` is (batch,
    line_no). Raises `KeyClosed` if that line may not run (any more), and `NoRoom` for a tenant's own key."""
    if line is not None:
        await _check_line(conn, *line)
    ended = Reply.state == "stored", Reply.expires_at <= now, Reply.batch_id.is_(None)
    await conn.execute(delete(Reply).where(_key(tenant_id, key), *ended))
    known = await _known(conn, tenant_id, key)
    if known is None and line is None:
        await _check_room(conn, tenant_id, now)
    row = {
        "tenant_id": tenant_id,
        "key": key,
        "fingerprint": fingerprint,
        "request_id": request_id,
        "slot": slot,
        "batch_id": line and line[0],
        "line_no": line and line[1],
        "num_bytes": RUNNING_BYTES,
        "created_at": now,
        "expires_at": now + KEEP_S,
    }
    statement = upsert(conn, Reply.__table__).values(row).on_conflict_do_nothing()
    while known is None:
        if (await conn.execute(statement.returning(Reply.key))).first() is not None:
            return None
        known = await _known(conn, tenant_id, key)  # None: its owner has just dropped it
    return known


async def _known(conn: AsyncConnection, tenant_id: str, key: str) -> Known | None:
    found = (await conn.execute(select(Reply.__table__).where(_key(tenant_id, key)))).first()
    return None if found is None else Known(found.fingerprint, _stored(found))


async def is_running(conn: AsyncConnection, tenant_id: str, key: str) -> bool:
    """Returns whether a request runs under the key: there is no answer yet."""
    return await conn.scalar(select(Reply.state).where(_key(tenant_id, key))) == "running"


async def _check_room(conn: AsyncConnection, tenant_id: str, now: int) -> None:
    """Raises NoRoom. It reads one index. Several claims at the same moment may pass the check together."""
    query = select(func.count(), func.sum(Reply.num_bytes), func.min(Reply.expires_at)).where(
        Reply.tenant_id == tenant_id, Reply.expires_at > now, Reply.batch_id.is_(None)
    )
    num_keys, num_bytes, until = (await conn.execute(query)).one()
    if num_keys >= MAX_KEYS:
        raise NoRoom("keys", MAX_KEYS, num_keys, until)
    if (num_bytes or 0) + RUNNING_BYTES > MAX_BYTES:
        raise NoRoom("bytes", MAX_BYTES, int(num_bytes), until)


async def _check_line(conn: AsyncConnection, batch_id: str, line_no: int) -> None:
    """Raises KeyClosed. By the shared locks a cancel, or the end of the line, comes either before this, or after the
    key is taken and then finds it. Locks are taken in the usual order: line, then batch."""
    line = select(BatchLine.state).where(BatchLine.batch_id == batch_id, BatchLine.line_no == line_no)
    line_state = await conn.scalar(line.with_for_update(read=True))
    batch = select(Batch.state, Batch.expires_at).where(Batch.id == batch_id)
    found = (await conn.execute(batch.with_for_update(read=True))).first()
    runs = found is not None and found.state == "in_progress" and found.expires_at > await now_ms(conn) // 1000
    if line_state != "started" or not runs:
        raise KeyClosed("This batch line has ended.")


async def store(
    conn: AsyncConnection,
    tenant_id: str,
    key: str,
    *,
    request_id: str,
    status: int,
    body: bytes,
    postings: Sequence[Posting],
    content_type: str | None = None,
) -> bool:
    """Stores the answer. Returns False if the key was closed meanwhile (its batch was cancelled): the request must end
    without a charge then. Storing twice changes nothing. `postings` are all that pay for the answer; an answer without
    any is free."""
    first, further = (postings[0], postings[1:]) if postings else (None, ())
    done = await conn.execute(
        update(Reply)
        .where(_key(tenant_id, key), Reply.request_id == request_id)
        .values(
            state="stored",
            status=status,
            content_type=content_type,
            body=body,
            num_bytes=len(body),
            posting=None if first is None else msgspec.msgpack.encode(first),
        )
    )
    if not done.rowcount:
        return False
    rows = [
        {
            "request_id": posting.request_id,
            "tenant_id": tenant_id,
            "key": key,
            "posting": msgspec.msgpack.encode(posting),
        }
        for posting in further
    ]
    if rows:
        statement = upsert(conn, IdempotentPosting.__table__).on_conflict_do_nothing()
        await conn.execute(statement, rows)
    return True


async def drop(conn: AsyncConnection, tenant_id: str, key: str, request_id: str) -> None:
    """Frees the key of a request that ended without an answer to keep: the key may run again."""
    await conn.execute(
        delete(Reply).where(_key(tenant_id, key), Reply.request_id == request_id, Reply.state == "running")
    )


async def drop_running(conn: AsyncConnection, slot: int) -> None:
    """Frees the keys that the slot's last process left running, once its journal is replayed."""
    await conn.execute(delete(Reply).where(Reply.slot == slot, _IS_RUNNING))


async def drop_lost(conn: AsyncConnection, slot: int, held: Collection[str], claimed_before: int) -> None:
    """Frees keys that the slot's process runs no more, although this did not reach SQL. `held` has the requests that it
    does run, and is complete for all that were claimed before that second."""
    lost = Reply.created_at < claimed_before, Reply.request_id.not_in(list(held))
    await conn.execute(delete(Reply).where(Reply.slot == slot, _IS_RUNNING, *lost))


async def close_lines(conn: AsyncConnection, batch_id: str, line_nos: Collection[int]) -> Mapping[int, Stored]:
    """Returns the stored answer of each line that has one. The key of any other line is taken away, so that no answer
    can come."""
    numbers = sorted(line_nos)
    stored: dict[int, Stored] = {}
    for start in range(0, len(numbers), 500):
        # Lines are locked before keys, as in `take`.
        lines = select(BatchLine.line_no).where(
            BatchLine.batch_id == batch_id, BatchLine.line_no.in_(numbers[start : start + 500])
        )
        await conn.execute(lines.order_by(BatchLine.line_no).with_for_update())
        mine = Reply.batch_id == batch_id, Reply.line_no.in_(numbers[start : start + 500])
        await conn.execute(delete(Reply).where(*mine, Reply.state == "running"))
        for row in await conn.execute(select(Reply.__table__).where(*mine)):
            found = _stored(row)
            if found is not None:
                stored[row.line_no] = found
    return stored


async def postings(conn: AsyncConnection, request_ids: Collection[str]) -> dict[str, Posting]:
    """Returns the postings of requests whose answer is stored: the content of their SETTLE if there was a crash in
    between."""
    ids = sorted(request_ids)
    found: dict[str, Posting] = {}
    for start in range(0, len(ids), 500):
        some = ids[start : start + 500]
        first = select(Reply.posting).where(Reply.request_id.in_(some), Reply.posting.is_not(None))
        further = select(IdempotentPosting.posting).where(IdempotentPosting.request_id.in_(some))
        for packed in (await conn.execute(first.union_all(further))).scalars():
            assert packed is not None
            posting = msgspec.msgpack.decode(packed, type=Posting)
            found[posting.request_id] = posting
    return found


async def owed(conn: AsyncConnection, tenant_id: str, key: str, stored: Stored) -> list[Posting]:
    """Returns the postings that pay for a stored answer and are not in the ledger (yet)."""
    further = select(IdempotentPosting.posting).where(
        IdempotentPosting.tenant_id == tenant_id, IdempotentPosting.key == key
    )
    packed = (await conn.execute(further)).scalars()
    due = [stored.posting] if stored.posting is not None else []
    due += [msgspec.msgpack.decode(one, type=Posting) for one in packed]
    posted = select(LedgerEntry.request_id).where(
        LedgerEntry.request_id.in_([posting.request_id for posting in due]), LedgerEntry.kind.in_(("settle", "void"))
    )
    ended = frozenset((await conn.execute(posted)).scalars())
    return [posting for posting in due if posting.request_id not in ended]


async def owed_by_batch(conn: AsyncConnection, batch_id: str) -> list[Posting]:
    """Returns the postings that pay for stored answers of a batch and are not in the ledger (yet)."""
    ended = select(LedgerEntry.request_id).where(
        LedgerEntry.request_id == Reply.request_id, LedgerEntry.kind.in_(("settle", "void"))
    )
    query = select(Reply.posting).where(Reply.batch_id == batch_id, Reply.posting.is_not(None), ~ended.exists())
    return [msgspec.msgpack.decode(one, type=Posting) for one in (await conn.execute(query)).scalars() if one]


async def purge(conn: AsyncConnection, now: int) -> bool:
    """Deletes stored answers that have expired, `PURGED_AT_ONCE` at most. Returns whether more may be there. Answers of
    a batch are deleted with the batch."""
    expired = select(Reply.request_id).where(_IS_STORED, Reply.batch_id.is_(None), Reply.expires_at <= now)
    ids = list(await conn.scalars(expired.order_by(Reply.expires_at).limit(PURGED_AT_ONCE)))
    if ids:
        await conn.execute(delete(Reply).where(among(conn, Reply.request_id, ids)))
    return len(ids) == PURGED_AT_ONCE


def _key(tenant_id: str, key: str) -> Any:
    return (Reply.tenant_id == tenant_id) & (Reply.key == key)


def _stored(row: Any) -> Stored | None:
    if row.state != "stored":
        return None
    posting = None if row.posting is None else msgspec.msgpack.decode(row.posting, type=Posting)
    return Stored(row.request_id, row.status, row.body, posting, row.content_type)
