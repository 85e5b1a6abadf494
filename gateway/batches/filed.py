"""Results of a batch that has ended, as its two files have them, in the order in which the lines ended. The files have them
in input order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from accounting.requests.batch_results import FiledLine

PART_BYTES = 1024 * 1024
"""The bytes of results that are read at once, unless a single one is larger."""


class Lines(Protocol):
    """A file of results."""

    def read(self, offset: int, num_bytes: int) -> bytes: ...

    def parts(self) -> Iterable[bytes]: ...


def parts(lines: Sequence[FiledLine], output: Lines | None, faults: Lines | None) -> Iterator[bytes]:
    """Yields the results of the lines, in their order. Each line stands in one of the two files."""
    files = {True: output, False: faults}
    starts = {is_output: _starts(file.parts()) for is_output, file in files.items() if file is not None}
    page: list[FiledLine] = []
    num_bytes = 0
    for line in lines:
        size = starts[line.is_output][line.num_before + 1] - starts[line.is_output][line.num_before]
        if page and num_bytes + size > PART_BYTES:
            yield _joined(page, files, starts)
            page, num_bytes = [], 0
        page.append(line)
        num_bytes += size
    if page:
        yield _joined(page, files, starts)


def _joined(page: Sequence[FiledLine], files: dict[bool, Lines | None], starts: dict[bool, array[int]]) -> bytes:
    """Returns the results of a page. They are read in the order of the files, whose parts are decrypted one by one."""
    read: dict[FiledLine, bytes] = {}
    for line in sorted(page, key=lambda one: (one.is_output, one.num_before)):
        file, begins = files[line.is_output], starts[line.is_output]
        assert file is not None
        read[line] = file.read(begins[line.num_before], begins[line.num_before + 1] - begins[line.num_before])
    return b"".join(read[line] for line in page)


def _starts(content: Iterable[bytes]) -> array[int]:
    """Returns the place at which each line of a file begins, and at the end that of its end."""
    starts, before = array("q", [0]), 0
    for part in content:
        at = part.find(b"\n")
        while at >= 0:
            starts.append(before + at + 1)
            at = part.find(b"\n", at + 1)
        before += len(part)
    return starts
