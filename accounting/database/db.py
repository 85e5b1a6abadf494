"""The one owner of a SQL engine. The module knows dialects, pools and transactions, but no table and no business.

There are two kinds of access: `read()` sees one snapshot and never writes; `write()` is one transaction that commits at
the end of the block. On SQLite a writer begins IMMEDIATE, so it waits at the start for other writers and never fails in
the middle.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Table,
    Text,
    bindparam,
    cast,
    column,
    event,
    func,
    literal,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError, StatementError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.util import await_only

from accounting.database.driver_inserts import driver_insert
from accounting.database.sqlite_cursor import OneTripConnection
from accounting.values.errors import AccountingError, DatabaseUnreachable, DatabaseUrlError

Dialect = Literal["sqlite", "postgresql"]

BUSY_TIMEOUT_MS = 5_000
DRIVERS = ("sqlite+aiosqlite", "postgresql+psycopg")
_URL_FORMS = "HEADGATE_DATABASE_URL is postgresql+psycopg://user:password@host/database, or sqlite+aiosqlite:///path."
_PATIENCE = {
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}
"""libpq takes these in seconds, but `tcp_user_timeout` in milliseconds."""
_SERVER_PATIENCE = {
    "tcp_keepalives_idle": "10s",
    "tcp_keepalives_interval": "5s",
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": "10s",
}
"""The settings by which the server gives up a client whose host is gone, with its transaction and its locks. By its
own defaults that takes two hours, and everybody waits for a lock of the ledger meanwhile."""
MAX_SQLITE_ROWS = 16
"""The most rows of one INSERT. Each number of rows is a separate statement that the driver keeps, and a long one
takes half a megabyte."""
MIN_READERS = 4
INSTRUCTIONS_AT_ONCE = 1_000_000
"""Instructions of SQLite's machine between two looks whether a statement was cancelled: some 10 ms."""
_VALUE = column("value", Text)
_EACH = text("SELECT value FROM json_each(:ids)")
"""SQLite's list of values in one parameter. The statement is written as text: one built from functions leaves 38
objects in reference cycles each time. Its parameter is made anew: one that is cloned from a template refers to itself,
and holds the list until the garbage collector comes by."""


class SqliteConnection(sqlite3.Connection):
    """A connection whose statement can be ended, and whose transaction ends when it is closed.

    A connection is closed only after its statement has ended, which may take minutes over big books. SQLite's own
    interrupt would also stop the rollback of a connection that has a half-read result. The progress handler stops the
    statement that runs, and nothing after it.

    A write that is cancelled in a statement has its connection closed. SQLite keeps a closed connection, with its lock,
    until its last statement is freed. One whose rows are streamed is half-read, and the cancelled task's traceback may
    hold it until the garbage collector runs. Without the rollback every other writer would get "database is locked"
    until then.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_interrupted = False
        self.set_progress_handler(lambda: self._is_interrupted, INSTRUCTIONS_AT_ONCE)

    def interrupt(self) -> None:
        self._is_interrupted = True

    def close(self) -> None:
        self._is_interrupted = False
        with suppress(sqlite3.Error):  # it may be closed already
            self.rollback()
        super().close()


class _Watched:
    """A connection that only asks whether others have committed. It holds no snapshot between two questions."""

    def __init__(self, path: Path) -> None:
        self._url = f"{path.absolute().as_uri()}?mode=rw"
        self._connection: sqlite3.Connection | None = None

    def number(self) -> int:
        if self._connection is None:
            self._connection = sqlite3.connect(self._url, uri=True, timeout=0, isolation_level=None)
        ((number,),) = self._connection.execute("PRAGMA data_version").fetchall()  # to the end: the snapshot is over
        return int(number)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _hide_values(engine: AsyncEngine) -> None:
    """Leaves a statement's values out of the texts of its errors: those are logged, and a tenant's words are among the
    values."""
    engine.sync_engine.hide_parameters = True


def _bound_servers_patience(engine: AsyncEngine) -> None:
    """Sets `_SERVER_PATIENCE` on each new connection. It is set by a statement, because a pooler between may refuse a
    connection that begins with settings."""
    calls = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SERVER_PATIENCE.items())

    @event.listens_for(engine.sync_engine, "connect")
    def _connect(dbapi_connection: Any, _record: Any) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(f"SELECT {calls}")
        cursor.close()
        dbapi_connection.commit()


def _watched(url: URL) -> _Watched | None:
    is_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    return _Watched(Path(str(url.database))) if is_file else None


class Database:
    """The database of one process and event loop. `close()` must be awaited before the loop ends."""

    def __init__(self, url: str, *, pool_size: int = 8) -> None:
        parsed = parsed_url(url)
        self.url = url
        """The URL with its password, for a process that has to open the same database."""
        self.dialect: Dialect = "sqlite" if parsed.get_backend_name() == "sqlite" else "postgresql"
        connect = self._sqlite if self.dialect == "sqlite" else self._postgresql
        self._readers, self._writers = connect(parsed, pool_size)
        self._watched = _watched(parsed)
        # SQLite has one writer. Inside a process an asyncio lock replaces the busy handler, which polls.
        self._turn = asyncio.Lock() if self.dialect == "sqlite" else None

    def _sqlite(self, url: URL, pool_size: int) -> tuple[AsyncEngine, AsyncEngine]:
        """Returns the pools of readers and of the writer. Connections are kept, since each is a thread with its own
        caches; the one used last is taken next. The writer has its own connection: the long statements of inserts are
        prepared once, and a writer waits for no reader."""
        readers, writers = (
            create_async_engine(
                url,
                pool_size=size,
                max_overflow=0,
                pool_use_lifo=True,
                pool_timeout=BUSY_TIMEOUT_MS / 1000,
                insertmanyvalues_page_size=MAX_SQLITE_ROWS,
                connect_args={"factory": SqliteConnection},
            )
            for size in (max(pool_size, MIN_READERS), 1)
        )
        sqlite_transactions(readers.sync_engine, only_reads=True)
        sqlite_transactions(writers.sync_engine, begin="BEGIN IMMEDIATE")
        for engine in (readers, writers):
            _hide_values(engine)
        return readers, writers

    def _postgresql(self, url: URL, pool_size: int) -> tuple[AsyncEngine, AsyncEngine]:
        engine = create_async_engine(
            url,
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_timeout=BUSY_TIMEOUT_MS / 1000,
            pool_pre_ping=True,
            # A server's own default may be another: a writer that waited for its turn would not see what came before it.
            isolation_level="READ COMMITTED",
            connect_args=driver_options(url),
        )
        if "options" not in url.query:  # an operator's own settings of the session stand there
            _bound_servers_patience(engine)
        _hide_values(engine)
        readers = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        return readers, engine

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Gives one snapshot for all statements of the block. Anything the block writes is rolled back."""
        async with self._readers.connect() as conn:
            yield conn

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Gives one transaction: it is committed at the end of the block and rolled back on an exception."""
        async with AsyncExitStack() as stack:
            if self._turn is not None:
                await stack.enter_async_context(self._turn)
            yield await stack.enter_async_context(self._writers.begin())

    def data_version(self) -> int | None:
        """Returns a number that is another one after each commit of any process, or None if the dialect has none.

        A round that has read something may leave it out until the number changes. Take the number before reading: what is
        committed meanwhile then changes it. SQLite compares a number in shared memory, which takes microseconds, where a
        read takes milliseconds; PostgreSQL has nothing of the kind.
        """
        if self._watched is None:
            return None
        try:
            return self._watched.number()
        except sqlite3.Error:  # whoever reads hears of it
            return None

    async def close(self) -> None:
        if self._watched is not None:
            self._watched.close()
        for engine in (self._readers, self._writers):
            await engine.dispose()


def parsed_url(url: str) -> URL:
    """Parses a database URL. A password that is given as `?password=` stands in its usual place, so that it is hidden like
    any other. Raises `DatabaseUrlError`."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseUrlError(f"The database URL cannot be read. {_URL_FORMS}") from None
    if parsed.drivername not in DRIVERS:
        raise DatabaseUrlError(
            f"The database URL must be of SQLite or PostgreSQL, not {parsed.drivername}://. {_URL_FORMS}"
        )
    if isinstance(password := parsed.query.get("password"), str):
        return parsed.set(password=password).difference_update_query(["password"])
    return parsed


def driver_options(url: URL) -> dict[str, Any]:
    """Returns driver arguments that the URL does not set. A server that does not answer is given up within seconds."""
    if url.get_backend_name() == "sqlite":
        return {}
    return {name: value for name, value in _PATIENCE.items() if name not in url.query}


@contextmanager
def reaching(url: URL) -> Iterator[None]:
    """Raises `DatabaseUnreachable` in place of a driver's error on connecting: one sentence, without passwords."""
    try:
        yield
    except DBAPIError as error:
        shown = url.difference_update_query(["sslpassword"]).render_as_string()
        raise DatabaseUnreachable(
            f"The database {shown} cannot be used: {first_line(error)}. See that it runs"
            " and may be used from here, or set HEADGATE_DATABASE_URL."
        ) from None


def first_line(error: SQLAlchemyError) -> str:
    """Returns the first line of the driver's message, without the statement, to be used at the end of a sentence."""
    said = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    return said.splitlines()[0].rstrip(".")[:300] if said else type(error).__name__


def is_rows_fault(failure: Exception) -> bool:
    """Says whether a repeat cannot help because this very row is refused. A statement that never reached the driver
    counts."""
    if isinstance(failure, DBAPIError):
        return isinstance(failure, DataError | IntegrityError)
    return isinstance(failure, StatementError | AccountingError | OverflowError)


def sqlite_transactions(engine: Any, begin: str = "BEGIN", *, only_reads: bool = False) -> None:
    """Sets durable settings on each connection, and sends BEGIN itself: by the driver's own rules DDL runs outside of
    transactions and locks are taken late. A statement takes one trip to the connection's thread, and so do all settings.
    If the engine only reads, its connections begin by themselves."""

    if engine.dialect.is_async:

        @event.listens_for(engine, "do_connect")
        def _open(dialect: Any, _record: Any, cargs: Any, cparams: Any) -> Any:
            return OneTripConnection(dialect.dbapi, dialect.connect(*cargs, **cparams)._connection)

    @event.listens_for(engine, "connect")
    def _connect(dbapi_connection: Any, _record: Any) -> None:
        if engine.dialect.is_async:
            await_only(dbapi_connection.trip(_set_durable))
        else:
            _set_durable(dbapi_connection)
        if only_reads:
            dbapi_connection.only_reads = True

    @event.listens_for(engine, "invalidate")
    def _invalidate(dbapi_connection: Any, _record: Any, _error: Any) -> None:
        # A task was cancelled in a statement. The connection can be closed only after the statement has ended.
        dbapi_connection.run_async(lambda connection: connection.interrupt())

    if not only_reads:

        @event.listens_for(engine, "begin")
        def _begin(conn: Connection) -> None:
            conn.exec_driver_sql(begin)


def _set_durable(connection: sqlite3.Connection) -> None:
    connection.isolation_level = None
    for pragma in (f"busy_timeout={BUSY_TIMEOUT_MS}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def among(
    conn: AsyncConnection, column: InstrumentedAttribute[Any], ids: Collection[str] | Collection[int]
) -> ColumnElement[bool]:
    """Returns the condition `column IN ids`, for texts or integers. It is one parameter for any number of ids: drivers
    are slow with many parameters, and the number of parameters is bounded."""
    if conn.dialect.name == "sqlite":
        values = bindparam("ids", msgspec.json.encode(sorted(ids)).decode(), unique=True, type_=Text)
        return column.in_(_EACH.bindparams(values).columns(_VALUE))
    of_one = BigInteger if isinstance(column.type, BigInteger) else Text
    return column == func.any(literal(sorted(ids), postgresql.ARRAY(of_one)))


def among_given(dialect: str, column: InstrumentedAttribute[Any], name: str = "ids") -> ColumnElement[bool]:
    """Returns the condition `column IN :ids` for texts or integers, in a statement that is built once; `given` makes
    its parameter. To build a statement of a wide table takes as long as to run it."""
    if dialect == "sqlite":
        return column.in_(select(_VALUE).select_from(func.json_each(bindparam(name, type_=Text))))
    of_one = BigInteger if isinstance(column.type, BigInteger) else Text
    return column == func.any(bindparam(name, type_=postgresql.ARRAY(of_one)))


def given(conn: AsyncConnection, ids: Collection[str] | Collection[int], name: str = "ids") -> dict[str, Any]:
    """Returns the parameter of `among_given`."""
    return {name: msgspec.json.encode(sorted(ids)).decode() if conn.dialect.name == "sqlite" else sorted(ids)}


def upsert(conn: AsyncConnection, table: FromClause) -> sqlite.Insert | postgresql.Insert:
    """Returns the dialect's INSERT, which supports ON CONFLICT; both dialects have the same methods."""
    assert isinstance(table, Table)
    return sqlite.insert(table) if conn.dialect.name == "sqlite" else postgresql.insert(table)


async def insert_new(
    conn: AsyncConnection,
    table: FromClause,
    rows: Sequence[Mapping[str, Any]],
    returning: Iterable[InstrumentedAttribute[Any]],
) -> list[Row[Any]]:
    """Runs `INSERT ... ON CONFLICT DO NOTHING RETURNING`. The returned rows are those that did not exist before."""
    if not rows:
        return []
    statement = _inserting_new(conn.dialect.name, table, tuple(rows[0]), tuple(returning))
    if conn.dialect.name != "sqlite":
        return list((await conn.execute(statement, _parameters(conn, rows))).all())
    made = driver_insert(statement, tuple(rows[0]))
    new: list[Row[Any]] = []
    for start in range(0, len(rows), MAX_SQLITE_ROWS):
        page = rows[start : start + MAX_SQLITE_ROWS]
        new += (await conn.exec_driver_sql(made.of_rows(len(page)), made.values(page))).all()
    return new


async def insert_all(conn: AsyncConnection, table: FromClause, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts many plain rows (numbers and text) at once. A row that exists already is an error."""
    if rows:
        await _insert(conn, _inserting(conn.dialect.name, table, tuple(rows[0])), rows)


async def insert_absent(conn: AsyncConnection, table: FromClause, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts those rows that do not exist, many at once, without finding out which they are."""
    if rows:
        await _insert(conn, _inserting_absent(conn.dialect.name, table, tuple(rows[0])), rows)


async def _insert(
    conn: AsyncConnection, statement: sqlite.Insert | postgresql.Insert, rows: Sequence[Mapping[str, Any]]
) -> None:
    if conn.dialect.name == "sqlite":
        made = driver_insert(statement, tuple(rows[0]))
        await conn.exec_driver_sql(made.text, [made.values([row]) for row in rows])
    else:
        await conn.execute(statement, _parameters(conn, rows))


async def add_up(
    conn: AsyncConnection, table: FromClause, rows: Sequence[Mapping[str, Any]], sums: Sequence[str]
) -> None:
    """Adds `sums` to those of the row with the same primary key, or inserts the row. `rows` must not name a key
    twice."""
    if rows:
        statement = _adding_up(conn.dialect.name, table, tuple(rows[0]), tuple(sums))
        await conn.execute(statement, _parameters(conn, rows))


# Statements are built once: building one takes longer than PostgreSQL needs for a hundred rows.


@cache
def _inserting_new(
    dialect: str, table: FromClause, names: tuple[str, ...], returning: tuple[InstrumentedAttribute[Any], ...]
) -> Any:
    return _inserting(dialect, table, names).on_conflict_do_nothing().returning(*returning)


@cache
def _inserting_absent(dialect: str, table: FromClause, names: tuple[str, ...]) -> Any:
    return _inserting(dialect, table, names).on_conflict_do_nothing()


@cache
def _adding_up(dialect: str, table: FromClause, names: tuple[str, ...], sums: tuple[str, ...]) -> Any:
    assert isinstance(table, Table)
    statement = _inserting(dialect, table, names)
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key), set_={name: table.c[name] + statement.excluded[name] for name in sums}
    )


@cache
def _inserting(dialect: str, table: FromClause, names: tuple[str, ...]) -> sqlite.Insert | postgresql.Insert:
    """Returns the INSERT of many rows. PostgreSQL takes all rows as one JSON parameter, since the driver's work for
    each value is what makes big inserts slow."""
    assert isinstance(table, Table)
    if dialect == "sqlite":
        return sqlite.insert(table)
    source = func.json_populate_recordset(
        literal_column(f'NULL::"{table.name}"'), cast(bindparam("rows", type_=Text()), postgresql.JSON)
    ).table_valued(*(column(name, table.c[name].type) for name in names))
    return postgresql.insert(table).from_select(list(names), select(source), include_defaults=False)


def _parameters(conn: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> Any:
    if conn.dialect.name == "sqlite":
        return list(rows)
    return {"rows": msgspec.json.encode(rows).decode()}
