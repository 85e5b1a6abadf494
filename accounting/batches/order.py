"""Lines are sorted by prefix and cut into chunks. The module is pure.

The parts of a request that precede generation (model, tools, messages in order) are written as canonical bytes. Sorting
by them puts lines with a common prefix next to each other, so that each finds its neighbour's KV in the prefix tree.
`line_no` keeps the input's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

BYTES_PER_TOKEN = 4
BLOCK_BYTES, MAX_BLOCKS = 512, 128
"""Bounds of a sort key. After its first two blocks a prefix is sorted by hashes, one per block, each over all bytes up
to there. Equal beginnings stay neighbours, which is enough, and a sort key stays below 3 KiB however long the line
is."""
CHUNK_TOKENS = 256 * 1024
"""A bound on a chunk's predicted prompt tokens, so that a few long lines also make a chunk."""
CHUNK_BYTES = 16 * 1024 * 1024
"""A bound on the bytes of a chunk's lines, which its runner holds in memory: not all of them precede generation."""


class Placed(msgspec.Struct, frozen=True):
    """A line that will run, and its position in the input file."""

    line_no: int
    offset: int
    num_bytes: int
    sort_key: bytes
    predicted_tokens: int


class PackedLine(msgspec.Struct, frozen=True, array_like=True):
    line_no: int
    offset: int
    num_bytes: int


def prefix_bytes(body: Mapping[str, Any]) -> bytes:
    """Returns canonical bytes. They are the same for bodies that differ in spacing or in the order of keys."""
    before = [body.get("model"), body.get("tools"), body.get("messages"), body.get("prompt"), body.get("input")]
    for name in ("system", "instructions"):  # the places of Messages and Responses for chat's first message
        if name in body:
            before.insert(2, body[name])
    return msgspec.json.encode(before, order="sorted")


def sort_key(prefix: bytes) -> bytes:
    num_blocks = min(len(prefix) // BLOCK_BYTES, MAX_BLOCKS)
    if num_blocks <= 2:
        return prefix[: 3 * BLOCK_BYTES]
    plain, hashed = 2 * BLOCK_BYTES, blake2b(prefix[: 2 * BLOCK_BYTES], digest_size=8)
    key = bytearray(prefix[:plain])
    for start in range(plain, num_blocks * BLOCK_BYTES, BLOCK_BYTES):
        hashed.update(prefix[start : start + BLOCK_BYTES])
        key += hashed.digest()
    tail = num_blocks * BLOCK_BYTES
    return bytes(key) + prefix[tail : tail + BLOCK_BYTES]


def predicted_tokens(prefix: bytes) -> int:
    return max(1, len(prefix) // BYTES_PER_TOKEN)


def chunks(lines: Iterable[Placed], max_lines: int) -> Iterator[list[Placed]]:
    """Yields chunks of at most `max_lines` lines, and of at most `CHUNK_TOKENS` predicted tokens and `CHUNK_BYTES`
    unless one line has more; never empty ones."""
    chunk: list[Placed] = []
    num_tokens = num_bytes = 0
    for line in sorted(lines, key=lambda line: (line.sort_key, line.line_no)):
        num_tokens += line.predicted_tokens
        num_bytes += line.num_bytes
        if chunk and (len(chunk) >= max_lines or num_tokens > CHUNK_TOKENS or num_bytes > CHUNK_BYTES):
            yield chunk
            chunk, num_tokens, num_bytes = [], line.predicted_tokens, line.num_bytes
        chunk.append(line)
    if chunk:
        yield chunk


def pack(lines: Sequence[Placed]) -> bytes:
    return msgspec.msgpack.encode([PackedLine(line.line_no, line.offset, line.num_bytes) for line in lines])


def unpack(packed: bytes) -> list[PackedLine]:
    return msgspec.msgpack.decode(packed, type=list[PackedLine])
