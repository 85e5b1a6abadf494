"""The lines of a batch's input file, as an estimate reads them: which of them can run, and the body of each.

Its functions run in threads, in short pieces. No line that is larger than a body is decoded.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator
from typing import Any

import msgspec

from accounting.batches.file_store import Reader
from accounting.batches.validate import MAX_LINES, Fault, LineChecker, Refused, split
from gateway.base import errors
from gateway.intake.json_body import decode_object

PIECE_BYTES = 256 * 1024
PIECE_LINES = 1_000
HEAD_BYTES = 8 * 1024
"""The room of a line beside its body: a custom_id of 512 characters takes up to 6 KiB."""
MAX_SHOWN = 100
"""The most faults that an estimate tells."""


class _Sent(msgspec.Struct):
    body: msgspec.Raw


class InputLines:
    """Call `check` until it returns False; then `body` gives the body of each good line."""

    def __init__(self, reader: Reader, endpoint: str, models: Container[str], json_body_bytes: int) -> None:
        self.num_lines = 0
        self.num_invalid = 0
        self.faults: list[Fault] = []
        """The first faults of single lines."""
        self.whole: Fault | None = None
        """A fault of the whole file."""
        self.num_bytes = 0
        """The bytes of all good lines."""
        self.numbers, self.sizes, self._offsets = array("I"), array("I"), array("q")
        """The good lines: their number in the file, from 1, and their bytes."""
        self._reader = reader
        self._most_bytes = json_body_bytes
        self._checker = LineChecker(endpoint, models)
        self._num_read = 0
        self._lines = enumerate(split(self._parts(), json_body_bytes + HEAD_BYTES), 1)

    @property
    def model(self) -> str | None:
        return self._checker.model

    @property
    def num_good(self) -> int:
        return len(self.numbers)

    def check(self) -> bool:
        """Checks the next lines, some 256 KiB of them. Returns whether there may be more. Raises `SealBroken`."""
        begun = self._num_read
        for _ in range(PIECE_LINES):
            found = next(self._lines, None)
            if found is None:
                if not self.num_lines:
                    self.whole = Fault("empty_file", None)
                return False
            line_no, (offset, raw) = found
            if line_no > MAX_LINES:
                self.whole = Fault("too_many_lines", None)
                return False
            self._take(line_no, offset, raw)
            if self._num_read - begun >= PIECE_BYTES:
                break
        return True

    def body(self, index: int) -> dict[str, Any]:
        """Returns the body of a good line, as the gateway would read it. Raises `ApiError`, and `SealBroken`."""
        raw = self._reader.read(self._offsets[index], self.sizes[index])
        body = bytes(msgspec.json.decode(raw, type=_Sent).body)
        if len(body) > self._most_bytes:
            raise errors.too_large()
        return decode_object(body)

    def _parts(self) -> Iterator[bytes]:
        for part in self._reader.parts():
            self._num_read += len(part)
            yield part

    def _take(self, line_no: int, offset: int, raw: bytes | None) -> None:
        self.num_lines = line_no
        try:
            self._checker.check(raw)
        except Refused as refused:
            self.num_invalid += 1
            if len(self.faults) < MAX_SHOWN:
                self.faults.append(Fault(refused.code, line_no, refused.custom_id))
            return
        assert raw is not None
        self.numbers.append(line_no)
        self.sizes.append(len(raw))
        self._offsets.append(offset)
        self.num_bytes += len(raw)
