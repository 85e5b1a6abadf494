"""Copies of a whole database: taken while others use it, and restored where there is none yet.

SQLite copies itself (https://www.sqlite.org/backup.html), PostgreSQL by its own `pg_dump` and `pg_restore`. Both copies
are one snapshot, and nobody who writes waits for them. The module does not know where a copy is kept.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import URL

from accounting.database.db import BUSY_TIMEOUT_MS, Dialect, driver_options, parsed_url, reaching
from accounting.values.errors import AccountingError
from accounting.values.progress import Told, nobody

PAGES_AT_ONCE = 1024
"""Pages of SQLite that are copied between two tellings: 4 MiB."""


class CopyFailed(AccountingError):
    """One sentence for the operator."""


def dialect_of(url: str) -> Dialect:
    return "sqlite" if parsed_url(url).get_backend_name() == "sqlite" else "postgresql"


def take(url: str, path: Path, told: Told = nobody) -> None:
    """Writes a copy of the database to `path`, which must not exist. Raises CopyFailed."""
    parsed = parsed_url(url)
    if dialect_of(url) == "sqlite":
        _copy_sqlite(_file(parsed), path, told)
    else:
        _run("pg_dump", ["--format=custom", f"--file={path}"], parsed)


def put(url: str, path: Path, told: Told = nobody) -> None:
    """Makes the database from a copy. There must be none: `refuse_used` says so before. Raises CopyFailed."""
    parsed = parsed_url(url)
    if dialect_of(url) == "sqlite":
        _copy_sqlite(path, _file(parsed), told)
    else:
        options = ["--no-owner", "--no-privileges", "--single-transaction", "--exit-on-error"]
        _run("pg_restore", options, parsed, [str(path)])


def refuse_used(url: str) -> None:
    """Raises CopyFailed if there is a database already: nothing is ever overwritten."""
    parsed = parsed_url(url)
    if dialect_of(url) == "sqlite":
        if _file(parsed).exists():
            raise CopyFailed(f"There is a database already, {_file(parsed)}: nothing is overwritten.")
        return
    engine = create_engine(parsed, connect_args=driver_options(parsed))
    try:
        with reaching(parsed), engine.connect() as conn:
            tables = inspect(conn).get_table_names()
    finally:
        engine.dispose()
    if tables:
        raise CopyFailed(
            f"The database {parsed.database} has {len(tables)} tables already, and nothing is overwritten: make an empty"
            " one (createdb), and name it in HEADGATE_DATABASE_URL."
        )


def _file(url: URL) -> Path:
    if not url.database:
        raise CopyFailed("A database in memory ends with its process and has no copies.")
    return Path(url.database)


def _copy_sqlite(source: Path, target: Path, told: Told) -> None:
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as read,
            closing(sqlite3.connect(target)) as written,
        ):
            read.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
            if told is nobody:
                read.backup(written)
            else:
                _copy_in_parts(read, written, told)
            found = written.execute("PRAGMA quick_check").fetchone()[0]
            written.execute("PRAGMA journal_mode=WAL")
        target.chmod(0o600)
    except (sqlite3.Error, OSError) as error:
        target.unlink(missing_ok=True)
        raise CopyFailed(f"The database {source} cannot be copied: {error}.") from None
    except BaseException:  # Ctrl-C or SIGTERM: half of a database would be taken for one
        target.unlink(missing_ok=True)
        raise
    if found != "ok":
        target.unlink()
        raise CopyFailed(f"The database {source} is damaged: {found}.")


def _copy_in_parts(read: sqlite3.Connection, written: sqlite3.Connection, told: Told) -> None:
    """Copies from one snapshot: without it, each write of another process would begin the copy anew."""
    read.execute("BEGIN")
    read.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
    read.backup(written, pages=PAGES_AT_ONCE, progress=lambda _, left, of: told(of - left, of))
    read.rollback()


def _run(program: str, options: Sequence[str], url: URL, arguments: Sequence[str] = ()) -> None:
    """Runs a program of PostgreSQL. The password goes by the environment, where other users do not see it."""
    if shutil.which(program) is None:
        raise CopyFailed(
            f"{program} is not on PATH: install PostgreSQL's client programs, of the server's version or newer."
        )
    plain = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    name = plain.render_as_string()
    env = {**os.environ, **({"PGPASSWORD": str(url.password)} if url.password else {})}
    command = [program, *options, "--no-password", f"--dbname={name}", *arguments]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if line.strip()), f"status {done.returncode}")
        raise CopyFailed(f"{program} failed: {first.removeprefix(f'{program}: ')}")
