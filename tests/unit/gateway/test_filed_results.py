"""Results of a batch that has ended are read from its two files in the order in which lines ended."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from accounting.batches.file_store import FileStore
from accounting.requests.batch_results import FiledLine
from gateway.batches.filed import Filed, LineStarts, parts

KEY = os.urandom(32)


def filed(store: FileStore, lines: Sequence[bytes]) -> Filed:
    writer = store.create(KEY)
    for line in lines:
        writer.write(line)
    writer.finish()
    reader = store.open(writer.storage_key, KEY)
    found, content = Filed(reader, LineStarts()), reader.parts()
    while found.starts.take(content):
        pass
    return found


def test_lines_of_all_sizes_come_from_both_files_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    """They cross the parts in which a file is stored, and the pages in which it is read."""
    chance, store = random.Random(4), FileStore(tmp_path)
    sizes = [0, 1, 65_535, 65_536, 65_537, 3 << 20, *(chance.randrange(200_000) for _ in range(40))]
    output = [b"%d:%s\n" % (number, b"o" * size) for number, size in enumerate(sizes)]
    faults = [b"%d:%s\n" % (number, b"f" * size) for number, size in enumerate(reversed(sizes))]
    wanted = [(True, number) for number in range(len(output))] + [(False, number) for number in range(len(faults))]
    chance.shuffle(wanted)
    lines = [FiledLine(place, place, is_output, number) for place, (is_output, number) in enumerate(wanted, 1)]
    files = {True: filed(store, output), False: filed(store, faults)}
    found = list(parts(lines[7:], files))
    for one in files.values():
        one.file.close()
    assert b"".join(found) == b"".join((output if is_output else faults)[number] for is_output, number in wanted[7:])
    assert len(found) > 5
    assert all(len(page) <= 1 << 20 or page.count(b"\n") == 1 for page in found)


def test_a_file_that_was_not_made_is_not_needed(tmp_path: Path) -> None:
    output = filed(FileStore(tmp_path), [b"{}\n"])
    assert list(parts([FiledLine(1, 1, True, 0)], {True: output})) == [b"{}\n"]
    output.file.close()
    assert list(parts([], {})) == []
