"""`headgate backup` and `headgate restore`: a home with its database in one file, and back (docs/backup.md)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tarfile import TarFile

import click

from accounting.database import copies, migrate
from accounting.database.db import Database
from gateway.base.home import Home, HomeError, usable
from gateway.cli import home_archive
from gateway.cli.common import example_text, fail, home_option
from gateway.cli.ending import cleared_on_sigterm
from gateway.cli.home_archive import DATABASE, FORMAT, OF_HOME, OF_STATE, UNPACKED, Manifest, Member
from gateway.cli.maintenance import show_verified, verified
from gateway.cli.progress import progress
from gateway.journal import engine_records


@click.command(epilog=example_text("backup /var/backups/headgate-2026-11-24.tar"))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@home_option
def backup(file: Path, home: Path) -> None:
    """Write the database, secrets, journals and files of this home into one file, also while Headgate runs.

    The file has the secrets, so its mode is 0600. It never replaces another one. Models and adapters are not part of it.
    """
    place = Home(home.expanduser().resolve())
    try:
        with cleared_on_sigterm():
            told = _pack(place, file.absolute())
    except HomeError as error:
        fail(str(error))
    click.echo(f"{file}: {len(told.sha256)} files, {file.stat().st_size / (1 << 20):.1f} MiB.")


@click.command(
    epilog=example_text(
        "restore headgate-2026-11-24.tar --home /srv/headgate\nrestore --journals host-2.tar --home /srv/headgate"
    )
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--check", is_flag=True, help="Write nothing; read the whole file and compare its checksums.")
@click.option("--journals", is_flag=True, help="Put back only the journals, and touch nothing else.")
@home_option
def restore(file: Path, check: bool, journals: bool, home: Path) -> None:
    """Make a home of a backup, upgrade its database to this version, and verify its books.

    The home must be empty, and so must the database if it is PostgreSQL's (HEADGATE_DATABASE_URL).

    With --journals only the journals are put back, beside a database that is there already, such as another host's. A
    slot that has a folder here is refused. Type `headgate journals replay` afterwards.
    """
    place = Home(home.expanduser().resolve())
    url = os.environ.get("HEADGATE_DATABASE_URL") or place.database_url
    try:
        with home_archive.opened(file) as (tar, manifest):
            migrate.refuse_newer(manifest.revision)
            if check:
                with progress("Checking") as told:
                    home_archive.unpack(tar, manifest, None, told)
                click.echo(f"{file}: {len(manifest.sha256)} files, all as they were packed by {manifest.headgate}.")
                return
            if journals:
                _put_journals(place, tar, manifest)
                click.echo(f"{place.state} has journals again: {', '.join(home_archive.slots_in(manifest))}.")
                click.echo("Type `headgate journals replay` before anything starts in these slots.")
                return
            _refuse_used(place, url, manifest)
            with _unpacked(place, place.root, tar, manifest) as unpacked:
                _settle(place, unpacked, url)
    except HomeError as error:
        fail(str(error))
    with progress("Migrating the database") as told:
        migrate.upgrade(url, told=told)
    raise SystemExit(_verify(place, url))


def _pack(home: Home, path: Path) -> Manifest:
    if path.exists():
        raise HomeError(f"The file {path} exists, and nothing is overwritten: give another name.")
    home.refuse_absent()
    url = os.environ.get("HEADGATE_DATABASE_URL") or home.database_url
    with usable(home.root), home_archive.held_sources(home) as sources, _room_beside(path) as room:
        sources.note()
        with progress("Copying the database") as told:
            copies.take(url, room / DATABASE, told)
        sources.note()
        manifest = Manifest(
            format=FORMAT,
            headgate=importlib.metadata.version("headgate"),
            taken_at=int(time.time()),
            database=copies.dialect_of(url),
            revision=migrate.revision(url),
            sha256={},
        )
        with progress("Packing") as told:
            return home_archive.pack(path, manifest, [*sources.members, Member(DATABASE, room / DATABASE)], told)


@contextmanager
def _room_beside(path: Path) -> Iterator[Path]:
    """Gives a directory for the database's copy, on the disk of the backup and not of the home. Raises `HomeError`."""
    try:
        room = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise HomeError(f"The backup {path} cannot be written: {error.strerror}.") from None
    with room as name:
        yield Path(name)


def _refuse_used(home: Home, url: str, manifest: Manifest) -> None:
    if manifest.database != copies.dialect_of(url):
        raise HomeError(
            f"The backup is of {manifest.database}, and HEADGATE_DATABASE_URL names another kind of database: set it to"
            " an empty database of that kind, or unset it for SQLite."
        )
    for path in (home.root, home.state):
        if path.is_dir() and any(path.iterdir()):
            raise HomeError(f"The directory {path} is not empty, and nothing is overwritten: name another with --home.")
    copies.refuse_used(url)


@contextmanager
def _unpacked(home: Home, directory: Path, tar: TarFile, manifest: Manifest, *, part: str = "") -> Iterator[Path]:
    """Gives a folder in `directory` with the members of the archive whose names begin with `part`. All members are
    checked before. The folder is removed afterwards. Raises `HomeError`.
    """
    unpacked = directory / UNPACKED
    with cleared_on_sigterm():
        try:
            with usable(home.root):
                for path in (home.root, directory):
                    path.mkdir(mode=0o700, parents=True, exist_ok=True)
                unpacked.mkdir(mode=0o700)
                with progress("Unpacking") as told:
                    home_archive.unpack(tar, manifest, unpacked, told, part=part)
                yield unpacked
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)


def _put_journals(home: Home, tar: TarFile, manifest: Manifest) -> None:
    """Puts each journal in its place, whole. Raises `HomeError`, also if one of the slots has a folder already."""
    slots = home_archive.slots_in(manifest)
    if not slots:
        raise HomeError("The backup has no journals.")
    for slot in slots:
        if (home.state / slot).exists():
            raise HomeError(
                f"The slot {slot} has a folder already, {home.state / slot}, and nothing is overwritten: name another home"
                " with --home."
            )
    with _unpacked(home, home.state, tar, manifest, part=f"{OF_STATE}/") as unpacked:
        for slot in slots:
            (unpacked / OF_STATE / slot).rename(home.state / slot)


def _settle(home: Home, unpacked: Path, url: str) -> None:
    """Puts the checked parts in their places, the database first: a home without it would get a new one at a start."""
    with progress("Restoring the database") as told:
        copies.put(url, unpacked / DATABASE, told)
    home.state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for part, target in ((OF_STATE, home.state), (OF_HOME, home.root)):
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted((unpacked / part).iterdir()) if (unpacked / part).is_dir() else ():
            shutil.move(path, target / path.name)  # the state may lie on another disk
    home.prepare()


def _verify(home: Home, url: str) -> int:
    """Brings the records of the home's workers into the books and verifies these. Returns the exit status."""

    async def work() -> int:
        database = Database(url)
        try:
            await engine_records.post_restored(database, home.state)
            with progress("Verifying the books") as told:
                found = await verified(home, database, told)
        finally:
            await database.close()
        show_verified(found)
        return 0 if found.report.ok else 1

    return asyncio.run(work())


COMMANDS: tuple[click.Command, ...] = (backup, restore)
