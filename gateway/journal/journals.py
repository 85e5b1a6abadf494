"""The journals of this machine: the slots that have one, its size, and the part of it that SQL does not have yet.

It only reads, also while a living process owns the journal. Of a worker's journal only the size is known here: its
format is the engine's.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.journal.dead_letters import DEAD_LETTERS
from gateway.journal.unshipped import unshipped
from workers.protocol.segments import SET_ASIDE, list_segments

GATEWAY = "gateway-"


class JournalState(msgspec.Struct, frozen=True, kw_only=True):
    slot: str
    segments: int
    bytes: int
    quarantined: int
    """The number of damaged segments that were set aside."""
    shipped_seq: int | None = None
    """The last record that is in SQL. None for a worker, which sends its records to gateways."""
    running: int | None = None
    """The number of requests that are opened and not ended, of a living gateway or of one that is to be replayed."""
    unshipped: int | None = None
    """The number of requests that ended and are not in SQL."""
    dead_letters: int | None = None
    """The number of records that SQL will never take; they are kept next to the journal."""


def gateway_journals(state_dir: Path) -> dict[int, Path]:
    """Returns the gateways' journals by slot."""
    found = {}
    for path in state_dir.glob(f"{GATEWAY}*/journal"):
        slot = path.parent.name.removeprefix(GATEWAY)
        if slot.isdigit():
            found[int(slot)] = path
    return found


def worker_journals(state_dir: Path) -> dict[str, Path]:
    paths = state_dir.glob("*/journal")
    return {path.parent.name: path for path in paths if not path.parent.name.startswith(GATEWAY)}


def of_gateway(slot: int, directory: Path, offset: int) -> JournalState:
    """Describes a gateway's journal. `offset` is the last of its records that is in SQL. Raises OSError."""
    left = unshipped(directory, offset)
    letters = directory / DEAD_LETTERS
    return msgspec.structs.replace(
        of_worker(f"{GATEWAY}{slot}", directory),
        shipped_seq=offset,
        running=len(left.running),
        unshipped=len(left.ended),
        dead_letters=len(letters.read_bytes().splitlines()) if letters.exists() else 0,
    )


def of_worker(slot: str, directory: Path) -> JournalState:
    segments = list_segments(directory)
    return JournalState(
        slot=slot,
        segments=len(segments),
        bytes=sum(segment.path.stat().st_size for segment in segments),
        quarantined=len(list(directory.glob(f"*{SET_ASIDE}"))),
    )


def num_set_aside(state_dir: Path) -> int:
    """Returns the number of damaged segments of all journals, gateways' and workers'."""
    return len(list(state_dir.glob(f"*/journal/*{SET_ASIDE}")))
