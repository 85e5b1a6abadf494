"""Which threads of `headgate up` have short turns on a core: those that answer others, and not those that compute."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Server

from workers.process import turns


@pytest.mark.skipif(turns.turn_ns() is None, reason="this system does not tell the length of a turn")
def test_who_answers_others_has_short_turns_and_who_computes_has_not(server: Server) -> None:
    server.client().completions.create(model=server.model, prompt="x", max_tokens=2)
    pids = server.ready["pids"]
    answering = [*pids["gateway"], pids["redis"], *pids["worker"]]
    assert [turns.turn_ns(pid) for pid in answering] == [turns.TURN_NS] * len(answering)
    threads = [int(task.name) for task in Path(f"/proc/{pids['worker'][0]}/task").iterdir()]
    long = [thread for thread in threads if turns.turn_ns(thread) != turns.TURN_NS]
    used = {thread: _ticks(pids["worker"][0], thread) for thread in threads}
    assert max((thread for thread in threads if thread != pids["worker"][0]), key=used.__getitem__) in long


def _ticks(pid: int, thread: int) -> int:
    """The processor time of a thread."""
    words = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])
