from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

import pytest
from alembic.script import ScriptDirectory
from load import stretched
from migrated import migrated
from sqlalchemy import create_engine, inspect, text

from accounting.database import alembic_runs, migrate
from accounting.tables.models import Base
from accounting.values.errors import SchemaError, SchemaNewer, SchemaOlder


def sync_url(url: str) -> str:
    return url.replace("sqlite+aiosqlite", "sqlite")


def tables(url: str) -> set[str]:
    engine = create_engine(sync_url(url))
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def execute(url: str, statement: str) -> None:
    engine = create_engine(sync_url(url))
    with engine.begin() as conn:
        conn.execute(text(statement))
    engine.dispose()


def test_up_and_up_again(database_url):
    with pytest.raises(SchemaOlder, match="headgate migrate"):
        migrate.check(database_url)
    migrate.upgrade(database_url)
    migrate.check(database_url)
    assert tables(database_url) == {*Base.metadata.tables, "alembic_version"}
    migrate.upgrade(database_url)
    migrate.check(database_url)


def test_the_known_revisions_are_those_of_the_scripts():
    scripts = ScriptDirectory(str(files("accounting.migrations")))
    assert list(migrate.known_revisions()) == [script.revision for script in scripts.walk_revisions()][::-1]
    assert migrate.head() == scripts.get_current_head()


def test_a_current_database_is_found_current_without_alembic(sqlite_url):
    migrated(sqlite_url)
    program = (
        "import sys; from accounting.database import migrate; url = sys.argv[1];"
        "migrate.upgrade(url); migrate.check(url); sys.exit('alembic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, sqlite_url], check=False).returncode == 0


def test_models_and_migrations_agree():
    migrate.check_models()


def test_a_table_that_no_migration_makes_is_found(monkeypatch):
    monkeypatch.setattr(Base, "metadata", Base.metadata.__class__())
    with pytest.raises(SchemaError, match="differ"):
        migrate.check_models()


def test_a_database_of_a_newer_headgate_is_refused_untouched(sqlite_url):
    migrated(sqlite_url)
    execute(sqlite_url, "UPDATE alembic_version SET version_num = '9999'")
    for refused in (migrate.check, migrate.upgrade):
        with pytest.raises(SchemaNewer, match="newer Headgate"):
            refused(sqlite_url)


def test_no_stranger_may_read_a_database_whatever_folder_it_is_in(tmp_path):
    """A folder that an administrator made with 0755 let every user of the machine read the books."""
    tmp_path.chmod(0o755)
    url = f"sqlite+aiosqlite:///{tmp_path}/x.db"
    migrate.upgrade(url)
    with sqlite3.connect(tmp_path / "x.db") as connection:
        connection.execute("UPDATE tenant SET name = name")
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert modes == dict.fromkeys(("x.db", "x.db-wal", "x.db-shm", "x.db.migrate.lock"), 0o600)
        for name, mode in (("x.db", 0o664), ("x.db-wal", 0o644), ("x.db-shm", 0o660)):
            (tmp_path / name).chmod(mode)
        migrate.upgrade(url)
        found = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("x.db", "x.db-wal", "x.db-shm")]
    connection.close()
    assert found[0] == 0o660, "its group may be meant"
    assert [mode & stat.S_IRWXO for mode in found] == [0, 0, 0]


def test_processes_that_start_together_migrate_once(tmp_path):
    url = f"sqlite+aiosqlite:///{tmp_path}/x.db"
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(migrate.upgrade, url) for _ in range(4)]:
            done.result()
    migrate.check(url)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_migration_that_waits_for_a_lock_lets_others_pass(database_url, monkeypatch, caplog):
    """It waited without a bound, and every gateway's statement stood in line behind it."""
    monkeypatch.setattr(alembic_runs, "LOCK_TIMEOUT_MS", 100, raising=False)
    monkeypatch.setattr(alembic_runs, "PAUSE_S", 0.1, raising=False)
    migrate.upgrade(database_url, "0011")
    engine = create_engine(database_url)
    with ThreadPoolExecutor(1) as pool, engine.connect() as holder, engine.connect() as reader:
        holder.execute(text("SELECT count(*) FROM tenant"))
        migration = pool.submit(migrate.upgrade, database_url)
        try:
            waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'tenant'::regclass")
            with engine.connect() as watching:
                while not watching.scalar(waiting):
                    watching.rollback()
            reader.execute(text("SET statement_timeout = '3s'"))
            assert reader.scalar(text("SELECT count(*) FROM tenant")) == 1
            reader.rollback()
            while "waits for a lock" not in caplog.text:
                assert not migration.done()
                time.sleep(0.01)
        finally:
            holder.rollback()
        migration.result(timeout=stretched(30))
    engine.dispose()
    migrate.check(database_url)


def test_a_migration_that_fails_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    url = f"sqlite+aiosqlite:///{tmp_path}/x.db"
    execute(url, "CREATE TABLE tenant (id INTEGER)")
    with pytest.raises(Exception, match="tenant already exists"):
        migrate.upgrade(url)
    assert tables(url) <= {"tenant", "alembic_version"}
    with pytest.raises(SchemaOlder):
        migrate.check(url)
