"""`headgate verify-books` and `headgate journals`: these commands read SQL themselves, so that they work when nothing
else runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import click
import msgspec

from accounting.books.equations import DOCUMENTED_IN
from accounting.database.db import Database
from accounting.requests import request_postings
from accounting.values.progress import Told, nobody
from gateway.base.home import Home
from gateway.base.redis_link import LimiterUnavailable
from gateway.books import last_verdict
from gateway.books.verification import Verified, verify
from gateway.cli import embedded
from gateway.cli.answers import show, warn
from gateway.cli.books_access import with_books
from gateway.cli.common import confirmation, example_text, fail, home_option, json_option
from gateway.cli.groups import Commands
from gateway.cli.progress import progress
from gateway.journal.journals import GATEWAY, JournalState, gateway_journals, of_gateway, of_worker, worker_journals
from gateway.limiter.limits import limiter_link
from gateway.metering.abandon import Abandoned, JournalThere, NoSuchSlot, abandon
from gateway.metering.replay import Replayed, replay, replay_worker
from workers.protocol.segments import SlotTaken

REDIS_TIMEOUT_S = 2.0
NAMED = 5
"""The number of failures printed per equation; --json has them all."""


@click.command("verify-books")
@home_option
@json_option
def verify_books(home: Path, as_json: bool) -> None:
    """Check that every engine token is a tenant's or a write-off, and every sum is the sum of its rows.

    Requests that still run, or whose journal is not shipped yet, are left out; their slots are named. So are those that
    ended in the last seven seconds and have no engine record yet.
    """
    place = Home(home)
    with progress("Verifying the books", quiet=as_json) as told:
        found = with_books(home, lambda database: verified(place, database, told))
    if as_json:
        click.echo(msgspec.json.encode(found.shape()))
    else:
        show_verified(found)
    raise SystemExit(0 if found.report.ok else 1)


@click.group(cls=Commands)
def journals() -> None:
    """Manage the journals: files of gateways and workers that are written before the books are."""


@journals.command("list")
@home_option
@json_option
def list_journals(home: Path, as_json: bool) -> None:
    """List the journal of every slot of this machine: its size, and how many of its requests run, or have ended and are
    not in SQL yet.
    """
    state_dir = Home(home).state
    found = with_books(home, lambda database: _list(state_dir, database))
    show([msgspec.structs.asdict(one) for one in found], JournalState.__struct_fields__, as_json)


@journals.command("replay", epilog=example_text("journals replay\njournals replay 0 worker-1"))
@click.argument("slots", nargs=-1)
@home_option
@json_option
def replay_journals(slots: tuple[str, ...], home: Path, as_json: bool) -> None:
    """Bring the journals of stopped gateways, and those of workers, into the books.

    A gateway's endings are booked, and each request that still ran becomes void. `headgate up` does this at its start
    for slots that it does not use. A slot that a living gateway owns is left to it.

    A worker may run meanwhile. Its engine records are booked if SQL lacks them: it may have had and lost them, as after
    a failover to a replica that was behind. Records whose requests neither SQL nor a gateway's journal here knows are
    left out.

    SLOTS are names that `headgate journals list` shows, or numbers of gateways. Without them, all journals here are
    replayed.
    """
    place = Home(home)
    known = _slots(place.state)
    wanted = {f"{GATEWAY}{int(slot)}" if slot.isdecimal() else slot: slot for slot in slots}
    if unknown := [slot for name, slot in wanted.items() if name not in known]:
        raise click.UsageError(
            f"There is no journal here of: {', '.join(unknown)}. `headgate journals list` shows the slots that have one."
        )
    found = with_books(home, lambda database: _replay(place, database, wanted or known))
    show([msgspec.structs.asdict(one) for one in found], Replayed.__struct_fields__, as_json)
    if not as_json:
        _tell_of_records(found)


@journals.command("abandon", epilog=example_text("journals abandon 2"))
@click.argument("slot", type=click.IntRange(0))
@home_option
@json_option
@confirmation("What was charged there and not shipped is lost to the books. Are all other gateways' journals replayed?")
def abandon_journal(slot: int, home: Path, as_json: bool) -> None:
    """End the requests that only the journal of gateway SLOT knew, whose disk is gone for good.

    The limits and budgets that it held are given back. Requests that a worker recorded more than ten minutes ago, that
    have no ending, and that no other journal or reservation names, become void: nobody is charged for them. One whose
    answer is stored under an Idempotency-Key is charged. A journal that exists is never abandoned: replay it.
    """
    place = Home(home)
    journals = gateway_journals(place.state)
    directory = place.state / f"{GATEWAY}{slot}" / "journal"
    try:
        found = with_books(home, lambda database: abandon(database, _redis_url(place), slot, journals, directory))
    except JournalThere:
        fail(f"The journal of slot {slot} is here: use `headgate journals replay {slot}`.")
    except NoSuchSlot:
        fail(f"There is no slot {slot}: no gateway that uses these books ever ran in it.")
    except SlotTaken:
        fail(f"A living gateway owns slot {slot}.")
    except LimiterUnavailable as error:
        fail(f"Redis must answer, so that nobody's running request is ended: {error}.")
    show([msgspec.structs.asdict(found)], Abandoned.__struct_fields__, as_json)


async def verified(home: Home, database: Database, told: Told = nobody) -> Verified:
    link = limiter_link(_redis_url(home), timeout_s=REDIS_TIMEOUT_S)
    try:
        found = await verify(database, home.state, link, told)
        await last_verdict.keep_by(link, found.shape())
        return found
    finally:
        await link.close()


async def _list(state_dir: Path, database: Database) -> list[JournalState]:
    slots = gateway_journals(state_dir)
    async with database.read() as conn:
        offsets = {slot: await request_postings.journal_offset(conn, slot) or 0 for slot in slots}
    found = [await asyncio.to_thread(of_gateway, n, slots[n], offsets[n]) for n in sorted(slots)]
    workers = sorted(worker_journals(state_dir).items())
    return found + [await asyncio.to_thread(of_worker, slot, path) for slot, path in workers]


def _slots(state_dir: Path) -> set[str]:
    """Returns the slots of this machine that have a journal, by the names that `headgate journals list` shows."""
    return {f"{GATEWAY}{slot}" for slot in gateway_journals(state_dir)} | worker_journals(state_dir).keys()


async def _replay(home: Home, database: Database, slots: Collection[str]) -> list[Replayed]:
    """Replays gateways first, because a worker's records are brought back if their requests are known."""
    gateways, workers = gateway_journals(home.state), worker_journals(home.state)
    found = [
        await replay(database, _redis_url(home), slot, gateways[slot])
        for slot in sorted(gateways)
        if f"{GATEWAY}{slot}" in slots
    ]
    return found + [
        await replay_worker(database, gateways, worker, workers[worker]) for worker in sorted(workers.keys() & slots)
    ]


def _tell_of_records(found: Sequence[Replayed]) -> None:
    if all(one.slot.startswith(GATEWAY) for one in found):
        return
    brought_back = _engine_records(sum(one.brought_back for one in found))
    click.echo(f"The journals of workers brought {brought_back} back into the books.")
    if num_left_out := sum(one.left_out for one in found):
        warn(
            f"The command left {_engine_records(num_left_out)} out, because neither the books nor a gateway's journal here"
            " knows their requests. Replay the gateways' journals on all hosts, then repeat it."
        )


def _engine_records(number: int) -> str:
    return "1 engine record" if number == 1 else f"{number} engine records"


def _redis_url(home: Home) -> str:
    """Returns the limiter's Redis URL. If Redis does not answer, the comparison with Redis is left out."""
    return os.environ.get("HEADGATE_REDIS_URL") or embedded.redis_url(home.run / "redis.sock")


def show_verified(found: Verified) -> None:
    for equation in found.report.equations:
        verdict = "ok" if equation.ok else "FAILED"
        click.echo(f"{equation.id:<4} {equation.name:<20} {verdict:<7} {equation.num_checked} checked")
        click.echo(f"     {equation.equation.meaning}")
        for name in equation.failures[:NAMED]:
            click.echo(f"       {name}")
    click.echo(f"The equations are explained in {DOCUMENTED_IN}.")
    if slots := found.unreplayed:
        click.echo(f"Left out: requests of gateway slots {', '.join(map(str, slots))} that are not in SQL yet.")


COMMANDS: tuple[click.Command, ...] = (verify_books, journals)
