"""The record format of every journal, the gateway's and the engine's: bytes to records and back. The module is pure and
opens no file.

The layout of a record, integers big endian:

    len u32 | crc32 u32 | ver u8 | kind u8 | seq u64 | prev_hash 8 B | payload (msgpack)

`len` counts the bytes after the crc. The crc covers `len` and the bytes after the crc. `prev_hash` is BLAKE2b-64 of the
whole record before, so records can be neither dropped nor reordered unnoticed. A segment is a file that begins with a
HEADER record; the hashes and the numbers continue from one segment to the next. A zero `len` is preallocated space.
`segments.py` owns the files. Each side defines what a payload means, and when bytes are synced.
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
"""The prev_hash of the very first record of a journal."""

_PREFIX = struct.Struct(">II")
_HEAD = struct.Struct(">BBQ8s")
_SUFFIX = ".journal"


class Kind(IntEnum):
    HEADER = 0
    OPEN = 1
    SETTLE = 4
    VOID = 5
    SEAL = 6
    COUNTS = 16
    """Engine: the token counts of running attempts so far, written before the step's frame is sent."""
    ENDED = 17
    """Engine: one attempt that ended (an `EngineRecord`)."""
    BEGUN = 20
    """Engine: an attempt arrived."""
    ACKED = 19
    """Engine: the last record that is committed in SQL."""


class SegmentHeader(msgspec.Struct, frozen=True):
    """The payload of a HEADER record."""

    slot: str
    process: str
    boot: int


class Record(msgspec.Struct, frozen=True):
    kind: int
    seq: int
    payload: bytes


class Chain:
    """The number of the next record and the hash of the last one. Only this class knows how the next record must
    look."""

    def __init__(self, next_seq: int = 1, prev_hash: bytes = NO_HASH) -> None:
        self.next_seq = next_seq
        self.prev_hash = prev_hash

    def encode(self, kind: int, payload: bytes) -> bytes:
        """Returns the next record. Raises `ValueError` above `MAX_PAYLOAD_BYTES`."""
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
    """The content of a segment. `torn` means that the last write did not finish; the records before it count. `corrupt`
    means that something before the end is damaged, so the segment has to be quarantined; `records` are those before the
    damage."""

    records: list[Record]
    num_valid_bytes: int
    """The length to truncate to before appending."""
    state: Literal["clean", "torn", "corrupt"]
    next_seq: int
    prev_hash: bytes

    def chain(self) -> Chain:
        """Returns a chain that continues after the last valid record."""
        return Chain(self.next_seq, self.prev_hash)


def scan(data: bytes, after: Scan | None = None) -> Scan:
    """Reads one segment. `after` is the scan of the segment before it; None stands for the first segment that is kept,
    whose beginning is trusted. O(bytes) unless damaged."""
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
    """Returns the number of bytes at the beginning that are whole records with numbers up to `after_seq`. Only their
    lengths are read, so it takes a tenth of the time of a `scan` and notices no damage."""
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
    """Returns a segment's file name. Names sort as their records do."""
    return f"{first_seq:020d}{_SUFFIX}"


def parse_segment_name(name: str) -> int | None:
    """Returns the number of a segment's first record, or None if the file is no segment."""
    digits = name.removesuffix(_SUFFIX)
    return int(digits) if name.endswith(_SUFFIX) and len(digits) == 20 and digits.isdecimal() else None


def _read(data: bytes, start: int) -> tuple[Record, bytes, int] | None:
    """Returns the record at `start`, its prev_hash and its end, or None if there is no complete valid one."""
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
    """Returns the state of the bytes after the last valid record. Nothing follows a torn write: a valid record of this
    journal further on means damage before the end."""
    rest = data[start:]
    if not rest.strip(b"\0"):
        return "clean"
    # A record that is valid but has a wrong number or hash counts too: a record was dropped or exchanged.
    for offset in range(start, len(data) - _PREFIX.size - _HEAD.size + 1):
        if data[offset + _PREFIX.size] == VERSION and _read(data, offset) is not None:
            return "corrupt"
    return "torn"


def _crc(body: bytes) -> int:
    return zlib.crc32(body, len(body))


def _hash(record: bytes) -> bytes:
    return blake2b(record, digest_size=8).digest()
