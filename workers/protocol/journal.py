"""The record format of every journal, gateway's and engine's: bytes to records and back. Pure; opens no file.

Layout of a record, integers big endian:

    len u32 | crc32 u32 | ver u8 | kind u8 | seq u64 | prev_hash 8 B | payload (msgpack)

`len` counts what follows the crc, the crc covers `len` and what follows the crc, `prev_hash` is BLAKE2b-64 of the whole
record before, so records can be neither dropped nor reordered unseen. A segment is a file that begins with a HEADER
record; the chain and the numbers run on from one segment into the next. A zero `len` is preallocated space.
What a payload means, when bytes are synced and which files are kept is each side's own.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from hashlib import blake2b
from typing import Literal

import msgspec

VERSION = 1
MAX_PAYLOAD_BYTES = 1024 * 1024
SEGMENT_BYTES = 64 * 1024 * 1024
NO_HASH = bytes(8)
"""prev_hash of the very first record of a journal."""

_PREFIX = struct.Struct(">II")
_HEAD = struct.Struct(">BBQ8s")
_SUFFIX = ".journal"


class Kind(IntEnum):
    HEADER = 0
    OPEN = 1
    PROGRESS = 2
    ATTEMPT = 3
    SETTLE = 4
    VOID = 5
    SEAL = 6
    COUNTS = 16
    """Engine: what running attempts have computed so far, before the step's frame leaves."""
    ENDED = 17
    """Engine: one attempt that ended (an `EngineRecord`)."""
    TOTALS = 18
    """Engine: running sums over steps."""
    BEGUN = 20
    """Engine: an attempt arrived."""
    ACKED = 19
    """Engine: the last record that is committed in SQL."""


class SegmentHeader(msgspec.Struct, frozen=True):
    """Payload of a HEADER record."""

    slot: str
    process: str
    boot: int


class Record(msgspec.Struct, frozen=True):
    kind: int
    seq: int
    payload: bytes


class Chain:
    """Numbers and links records. The one place that knows what the next record must look like."""

    def __init__(self, next_seq: int = 1, prev_hash: bytes = NO_HASH) -> None:
        self.next_seq = next_seq
        self.prev_hash = prev_hash

    def encode(self, kind: int, payload: bytes) -> bytes:
        """The next record. Raises `ValueError` above `MAX_PAYLOAD_BYTES`."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"journal payload of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
        body = _HEAD.pack(VERSION, kind, self.next_seq, self.prev_hash) + payload
        record = _PREFIX.pack(len(body), _crc(body)) + body
        self._advance(record)
        return record

    def _advance(self, record: bytes) -> None:
        self.next_seq += 1
        self.prev_hash = _hash(record)


class Scan(msgspec.Struct, frozen=True):
    """What a segment holds. `torn`: the last write did not finish, what lies before it counts. `corrupt`: something
    before the tail is damaged, the segment is to be quarantined; `records` are those before the damage."""

    records: list[Record]
    num_valid_bytes: int
    """Truncate here before appending."""
    state: Literal["clean", "torn", "corrupt"]
    next_seq: int
    prev_hash: bytes

    def chain(self) -> Chain:
        """Continues after the last valid record."""
        return Chain(self.next_seq, self.prev_hash)


def scan(data: bytes, after: Scan | None = None) -> Scan:
    """Reads one segment; `after` is the scan of the segment before it (None: the first one kept, whose beginning is
    believed). O(bytes) unless damaged."""
    records: list[Record] = []
    expected = after.chain() if after is not None else None
    start = 0
    while (found := _read(data, start)) is not None:
        record, prev_hash, end = found
        if expected is None:
            expected = Chain(record.seq, prev_hash)
        if record.seq != expected.next_seq or prev_hash != expected.prev_hash:
            break
        expected._advance(data[start:end])
        records.append(record)
        start = end
    expected = expected or Chain()
    return Scan(records, start, _tail_state(data, start, expected.next_seq), expected.next_seq, expected.prev_hash)


def num_bytes_until(data: bytes, after_seq: int) -> int:
    """Of the whole records at the beginning whose numbers are at most that. By their lengths alone, so it takes a tenth
    of a `scan`, and of damage it sees nothing."""
    position = 0
    while position + _PREFIX.size + _HEAD.size <= len(data):
        num_bytes, _ = _PREFIX.unpack_from(data, position)
        _, _, seq, _ = _HEAD.unpack_from(data, position + _PREFIX.size)
        end = position + _PREFIX.size + num_bytes
        if num_bytes < _HEAD.size or seq > after_seq or end > len(data):
            break
        position = end
    return position


def segment_name(first_seq: int) -> str:
    """File names sort as their records do."""
    return f"{first_seq:020d}{_SUFFIX}"


def parse_segment_name(name: str) -> int | None:
    """The number of a segment's first record; None if the file is no segment."""
    digits = name.removesuffix(_SUFFIX)
    return int(digits) if name.endswith(_SUFFIX) and len(digits) == 20 and digits.isdecimal() else None


def _read(data: bytes, start: int) -> tuple[Record, bytes, int] | None:
    """The record at `start`, its prev_hash and its end; None if there is no whole, sound one."""
    body_start = start + _PREFIX.size
    if body_start + _HEAD.size > len(data):
        return None
    num_bytes, crc = _PREFIX.unpack_from(data, start)
    end = body_start + num_bytes
    if not _HEAD.size <= num_bytes <= _HEAD.size + MAX_PAYLOAD_BYTES or end > len(data):
        return None
    version, kind, seq, prev_hash = _HEAD.unpack_from(data, body_start)
    if version != VERSION or _crc(data[body_start:end]) != crc:
        return None
    return Record(kind, seq, data[body_start + _HEAD.size : end]), prev_hash, end


def _tail_state(data: bytes, start: int, next_seq: int) -> Literal["clean", "torn", "corrupt"]:
    """A tear is followed by nothing: a sound record of this journal further on means damage before the tail."""
    rest = data[start:]
    if not rest.strip(b"\0"):
        return "clean"
    # Sound but out of the chain counts as well: a record was dropped or exchanged.
    for offset in range(start, len(data) - _PREFIX.size - _HEAD.size + 1):
        if data[offset + _PREFIX.size] == VERSION and _read(data, offset) is not None:
            return "corrupt"
    return "torn"


def _crc(body: bytes) -> int:
    return zlib.crc32(body, len(body))


def _hash(record: bytes) -> bytes:
    return blake2b(record, digest_size=8).digest()
