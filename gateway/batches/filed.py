"""Results of a batch that has ended, as its two files have them, in the order in which the lines ended. The files have them
in input order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from accounting.batches.file_store import Reader
from accounting.requests.batch_results import FiledLine

PART_BYTES = 1024 * 1024
"""The bytes of results that are read at once, unless a single one is larger."""
PARTS_AT_ONCE = 16
"""The parts of a file that are looked through at once."""


class LineStarts:
    """The places in a file at which its lines begin, and at the end that of its end. They are found step by step, so that
    a large file keeps no thread for long.
    """

    def __init__(self) -> None:
        self.places = array("q", [0])
        self._num_bytes = 0

    def take(self, parts: Iterator[bytes]) -> bool:
        """Looks through the next parts of the file. Returns whether there are more."""
        part = b""
        for part in islice(parts, PARTS_AT_ONCE):
            at = part.find(b"\n")
            while at >= 0:
                self.places.append(self._num_bytes + at + 1)
                at = part.find(b"\n", at + 1)
            self._num_bytes += len(part)
        return bool(part)

    def place(self, line: FiledLine) -> tuple[int, int]:
        """Returns where the line begins, and its size in bytes."""
        begin, end = self.places[line.num_before], self.places[line.num_before + 1]
        return begin, end - begin


@dataclass(frozen=True)
class Filed:
    """A file of results, with the places of its lines."""

    file: Reader
    starts: LineStarts


def parts(lines: Sequence[FiledLine], files: Mapping[bool, Filed]) -> Iterator[bytes]:
    """Yields the results of the lines, in their order. `files` has the file of answers as True and that of errors as
    False, as far as a line stands in them."""
    page: list[FiledLine] = []
    num_bytes = 0
    for line in lines:
        _, size = files[line.is_output].starts.place(line)
        if page and num_bytes + size > PART_BYTES:
            yield _joined(page, files)
            page, num_bytes = [], 0
        page.append(line)
        num_bytes += size
    if page:
        yield _joined(page, files)


def _joined(page: Sequence[FiledLine], files: Mapping[bool, Filed]) -> bytes:
    """Returns the results of a page. They are read in the order of the files, whose parts are decrypted one by one."""
    read: dict[FiledLine, bytes] = {}
    for line in sorted(page, key=lambda one: (one.is_output, one.num_before)):
        filed = files[line.is_output]
        read[line] = filed.file.read(*filed.starts.place(line))
    return b"".join(read[line] for line in page)
