"""kill -9 in a loop, from a seed: which victim comes next, and who is killed for it. Knows no clients and no books."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import psycopg
from fleet import Fleet

Victim = Literal["gateway", "worker", "redis", "poster", "database"]
WEIGHTS: dict[Victim, int] = {"gateway": 4, "worker": 2, "redis": 2, "poster": 3, "database": 3}


@dataclass(frozen=True)
class Kill:
    victim: Victim
    draw: float
    """It chooses one of them: a slot's gateway, its poster, a worker; of database connections, how many."""
    after_answers: int
    after_s: float
    """The load goes on for so many answers and seconds first."""


def schedule(seed: int, num_kills: int, victims: Sequence[Victim]) -> list[Kill]:
    """The same for the same seed."""
    rng = random.Random(seed)
    weights = [WEIGHTS[victim] for victim in victims]
    return [
        Kill(rng.choices(victims, weights)[0], rng.random(), rng.randint(1, 6), rng.uniform(0.0, 0.4))
        for _ in range(num_kills)
    ]


def execute(kill: Kill, fleet: Fleet) -> int:
    """Returns how many were killed: a process that is being started anew is no victim."""
    if kill.victim == "database":
        return _terminate_backends(fleet.database_url, kill.draw)
    pids = fleet.pids(kill.victim)
    try:
        os.kill(pids[int(kill.draw * len(pids))], signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return 0
    return 1


def _terminate_backends(database_url: str, share: float) -> int:
    """Some of the database's connections, at least one; whatever they were doing."""
    plain = database_url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(plain, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " ORDER BY pid"
        ).fetchall()
        for (pid,) in rows[: max(1, round(share * len(rows)))]:
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    return len(rows)
