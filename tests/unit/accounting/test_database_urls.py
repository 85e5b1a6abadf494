"""A password in a database URL is shown nowhere, wherever it stands in it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from accounting.database import copies, migrate
from accounting.database.db import parsed_url
from accounting.values.errors import DatabaseUnreachable

PLACES = [
    "u:geheim@127.0.0.1:1/db",
    "u@127.0.0.1:1/db?password=geheim",
    "u:x@127.0.0.1:1/db?sslmode=disable&password=geheim",
]
each_place = pytest.mark.parametrize("place", PLACES)


@each_place
def test_an_error_does_not_show_the_password(place):
    with pytest.raises(DatabaseUnreachable, match=r"127\.0\.0\.1:1/db") as found:
        migrate.check(f"postgresql+psycopg://{place}")
    assert "geheim" not in str(found.value)


def test_an_error_does_not_show_the_password_of_a_key():
    with pytest.raises(DatabaseUnreachable) as found:
        migrate.check("postgresql+psycopg://u@127.0.0.1:1/db?sslpassword=geheim")
    assert "geheim" not in str(found.value)


@each_place
def test_a_program_of_postgresql_gets_the_password_by_the_environment(place, monkeypatch):
    """Every user of the machine can read its arguments."""
    seen = {}

    def run(command, env, **_):
        seen.update(command=command, password=env.get("PGPASSWORD"))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(copies.shutil, "which", lambda program: program)
    copies.take(f"postgresql+psycopg://{place}", Path("/nowhere/copy"))
    assert seen["password"] == "geheim"
    assert "geheim" not in str(seen["command"])
    assert parsed_url(f"postgresql+psycopg://{place}").password == "geheim"
