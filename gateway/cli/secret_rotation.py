"""`headgate secrets`: new key files for a home, while nothing of it runs (docs/backup.md; ADR 105)."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import click

from accounting.access import api_keys
from accounting.database.auth_epoch import CLI
from accounting.database.db import Database
from accounting.lifecycle import master_key
from accounting.values.types import OPERATOR_TENANT
from gateway.base.home import NEXT, SECRET_BYTES, Home, HomeError, write_private
from gateway.cli.books_access import with_books
from gateway.cli.common import confirmation, example_text, fail, home_option
from gateway.cli.groups import Commands
from gateway.journal.journals import gateway_journals, worker_journals
from workers.protocol.segments import SlotTaken, take_slot


@click.group("secrets", cls=Commands)
def commands() -> None:
    """Replace the key files of a home. Stop everything of it first; other hosts get the new files by copy."""


@commands.command("rotate-master-key", epilog=example_text("secrets rotate-master-key"))
@home_option
def rotate_master_key(home: Path) -> None:
    """Draw a new master key, and wrap with it every tenant's data key, every webhook's secret and every upstream's credential.

    No stored text is encrypted again, because texts are under the data keys. Prefix caches begin empty.
    """
    place = _stopped(home)
    path = place.root / "secrets" / "master.key"
    following = path.with_name(path.name + NEXT)

    async def work(database: Database) -> int:
        async with database.write() as conn:
            old = place.read_secret("master.key", may_be_rotating=True)
            if following.exists():
                new = following.read_bytes()
                if await master_key.fits(conn, new):  # an interrupted rotation had come to its end here
                    return 0
            new = secrets.token_bytes(SECRET_BYTES)
            write_private(following, new)  # before the commit: what is wrapped can be opened whatever happens
            return await master_key.rewrap(conn, old, new)

    try:
        count = with_books(home, work)
        os.replace(following, path)
    except HomeError as error:
        fail(str(error))
    click.echo(f"The master key is new; {count} keys were wrapped with it. Take a backup: older ones have the old key.")


@commands.command("rotate-pepper", epilog=example_text("secrets rotate-pepper"))
@home_option
def rotate_pepper(home: Path) -> None:
    """Draw a new pepper. API keys that exist go on until `drop-old-peppers`; rotate them in the meantime.

    Credentials that batches and background responses have are made of the new pepper at once.
    """
    place = _stopped(home)
    try:
        old = place.read_secret("pepper")
        write_private(place.root / "secrets" / "pepper", secrets.token_bytes(SECRET_BYTES) + old)
    except HomeError as error:
        fail(str(error))
    click.echo(
        "The pepper is new. API keys that were made before go on; `headgate keys rotate` gives each a new value."
    )


@commands.command("drop-old-peppers", epilog=example_text("secrets drop-old-peppers"))
@home_option
@confirmation("Every API key that was not made or rotated since the pepper is new ends. Go on?")
def drop_old_peppers(home: Path) -> None:
    """Forget older peppers. API keys that were made with them end; an admin key is made and printed."""
    place = _stopped(home)
    try:
        pepper = place.read_secret("pepper")[:SECRET_BYTES]
        write_private(place.root / "secrets" / "pepper", pepper)
        place.credentials.unlink(missing_ok=True)  # the first start's keys, which end too
    except HomeError as error:
        fail(str(error))

    async def make(database: Database) -> str:
        async with database.write() as conn:
            key = await api_keys.create(
                conn,
                pepper,
                tenant_id=OPERATOR_TENANT,
                now=int(time.time()),
                kind="admin",
                name="after drop-old-peppers",
                actor=CLI,
            )
        return key.value

    click.echo(f"Older peppers are gone. A new admin key, shown once: {with_books(home, make)}")


def _stopped(home: Path) -> Home:
    """Returns the home if nothing runs in it. A process with the old key would write what nobody could read."""
    place = Home(home.expanduser().resolve())
    place.refuse_absent()
    pid = place.runs_as()
    if pid is not None:
        fail(f"`headgate up` (pid {pid}) runs in {place.root}: stop it first.")
    for directory in (*gateway_journals(place.state).values(), *worker_journals(place.state).values()):
        try:
            os.close(take_slot(directory))
        except SlotTaken:
            fail(f"The process of {directory.parent.name} runs in {place.root}: stop it first.")
    return place


COMMANDS: tuple[click.Command, ...] = (commands,)
