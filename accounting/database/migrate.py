"""Migration of a database to the code's schema, and the question whether it is there already.

The functions are synchronous on purpose: they run once, before an event loop exists. Alembic, which runs the scripts,
takes 10 MB with its libraries and is loaded only where a script has to run (`alembic_runs.py`).
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, inspect, text

from accounting.database.db import driver_options, parsed_url, reaching, sqlite_transactions
from accounting.values.errors import SchemaNewer, SchemaOlder
from accounting.values.progress import Told, nobody


def upgrade(url: str, revision: str = "head", told: Told = nobody) -> None:
    """Runs every migration that is missing; `told` hears of each. Raises SchemaNewer if the database is newer than this
    code; nothing is changed then. Like `check`, it raises `DatabaseUrlError` or `DatabaseUnreachable` if no database
    can be used. A file of SQLite is made for its owner alone, and one that is there is closed to strangers."""
    if (path := _sqlite_file(url)) is not None and path.parent.is_dir():
        _close_to_strangers(path)
    with _engine(url) as engine:
        if revision == "head" and _found(engine) == head():
            return
        from accounting.database import alembic_runs

        with alembic_runs.locked(engine) as conn:
            if revision == "head":
                refuse_newer(revision_of(conn))
            alembic_runs.upgrade(conn, revision, revision_of(conn), told)


def check(url: str) -> None:
    """Raises SchemaOlder or SchemaNewer unless the database is exactly at the code's revision. It makes no file."""
    if (absent := _absent_file(url)) is not None:
        raise SchemaOlder(f"There is no database in {absent}: name another one, or run `headgate migrate`.")
    found = revision(url)
    refuse_newer(found)
    if found != head():
        raise SchemaOlder(
            f"The database is at {found or 'no revision'}, this Headgate needs {head()}: run `headgate migrate`."
        )


def revision(url: str) -> str | None:
    """Returns the revision of a database, or None for an empty one."""
    with _engine(url) as engine:
        return _found(engine)


def unsafe_settings(url: str) -> list[str]:
    """Returns the settings with which PostgreSQL may lose a commit that it has confirmed. SQLite's are the code's own.
    Raises like `check`.
    """
    with _engine(url) as engine, engine.connect() as conn:
        if conn.dialect.name != "postgresql":
            return []
        return [name for name in ("synchronous_commit", "fsync") if conn.scalar(text(f"SHOW {name}")) == "off"]


def is_used(url: str) -> bool:
    """Says whether the database has API keys, which the pepper of one home made, whatever its revision. It makes no file.
    Raises `DatabaseUrlError` or `DatabaseUnreachable`."""
    if (path := _sqlite_file(url)) is not None and not path.exists():
        return False
    with _engine(url) as engine, engine.connect() as conn:
        return inspect(conn).has_table("api_key") and conn.scalar(text("SELECT 1 FROM api_key LIMIT 1")) is not None


def refuse_newer(revision: str | None) -> None:
    """Raises SchemaNewer unless this code knows the revision."""
    if revision is not None and revision not in known_revisions():
        raise SchemaNewer("The database was migrated by a newer Headgate: install that version or restore a backup.")


def check_models() -> None:
    """Raises SchemaError if models.py and the migrations differ. It uses a temporary SQLite database."""
    from accounting.database import alembic_runs

    with tempfile.TemporaryDirectory(prefix="headgate-models-") as folder:
        url = f"sqlite:///{folder}/models.db"
        upgrade(url)
        with _engine(url) as engine, engine.connect() as conn:
            alembic_runs.compare(conn)


@cache
def known_revisions() -> tuple[str, ...]:
    """Returns the revisions that this code knows, in order. The name of a script begins with its revision."""
    scripts = (path.name for path in files("accounting.migrations").joinpath("versions").iterdir())
    return tuple(sorted(name.partition("_")[0] for name in scripts if name[0].isdigit() and name.endswith(".py")))


def head() -> str:
    """Returns the code's revision."""
    return known_revisions()[-1]


def revision_of(conn: Connection) -> str | None:
    if not inspect(conn).has_table("alembic_version"):
        return None
    found: str | None = conn.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def _absent_file(url: str) -> str | None:
    """Returns the file of an SQLite database that is not there, in a folder that is: the driver would make it."""
    path = _sqlite_file(url)
    return str(path) if path is not None and path.parent.is_dir() and not path.exists() else None


def _sqlite_file(url: str) -> Path | None:
    told = parsed_url(f"sqlite+aio{url}" if url.startswith("sqlite:") else url)
    if told.get_backend_name() != "sqlite" or told.database in (None, "", ":memory:"):
        return None
    return Path(str(told.database))


def _close_to_strangers(path: Path) -> None:
    """Makes the file, mode 0600, or takes the rights of those from it who are neither its owner nor in its group. SQLite
    makes the two files beside it with the mode of the file. Who may not change it leaves it as it is.
    """
    with suppress(OSError):  # the driver says what is wrong with the path
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for one in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        with suppress(OSError):
            if (mode := stat.S_IMODE(one.stat().st_mode)) & stat.S_IRWXO:
                one.chmod(mode & ~stat.S_IRWXO)


def _found(engine: Engine) -> str | None:
    with engine.connect() as conn:
        return revision_of(conn)


@contextmanager
def _engine(url: str) -> Iterator[Engine]:
    told = parsed_url(f"sqlite+aio{url}" if url.startswith("sqlite:") else url)
    is_sqlite = told.get_backend_name() == "sqlite"
    parsed = told.set(drivername="sqlite") if is_sqlite else told
    engine = create_engine(parsed, connect_args=driver_options(parsed))
    if engine.dialect.name == "sqlite":
        sqlite_transactions(engine)
    try:
        with reaching(told), engine.connect():
            pass
        yield engine
    finally:
        engine.dispose()
