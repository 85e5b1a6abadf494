"""The time limit of a child: of the time without progress, and not of the whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from load import stretched

from workers.jobs.base.time_limit import excused_until

CHILD = """
import sys, threading, time
from pathlib import Path
from workers.jobs.base.time_limit import TimeLimit, excused_until

def write(limit):
    for _ in range(8):
        time.sleep(0.15)
        limit.progress()

with TimeLimit(1.0, Path(sys.argv[1])) as limit:
    thread = threading.Thread(target=write, args=(limit,))
    thread.start()
    thread.join()
    limit.progress(5)
    print(excused_until(Path(sys.argv[1])) - time.time() > 4)
    time.sleep(1.2)
    print("written", flush=True)
    if sys.argv[2] == "hangs":
        limit.progress()
        time.sleep(20)
limit.progress()  # a thread of the work that is over
print(excused_until(Path(sys.argv[1])))
time.sleep(1.2)
"""


def test_a_child_may_take_long_while_it_gets_on_and_is_killed_when_it_does_not(tmp_path: Path) -> None:
    begun = time.monotonic()
    children = []
    for how in ("ends", "hangs"):
        (tmp_path / how).mkdir()
        command = [sys.executable, "-c", CHILD, str(tmp_path / how / "pulse"), how]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    (ended, _), (hung, _) = [child.communicate(timeout=stretched(60)) for child in children]
    assert ended.splitlines() == [b"True", b"written", b"0.0"]
    assert hung.splitlines() == [b"True", b"written"]
    assert [child.returncode for child in children] == [0, -signal.SIGALRM]
    assert time.monotonic() - begun < 15
    for how in ("ends", "hangs"):
        assert excused_until(tmp_path / how / "pulse") == 0, "a child that died excuses nobody"
        assert not list((tmp_path / how).iterdir())
