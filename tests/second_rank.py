"""Rank 1 of the tests' pair: a process that loads one model after the other as it is told on stdin, and follows.

Arguments: the meeting file, the socket's number, the parent's process id.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from workers.process.children.parent import die_with


def main() -> None:
    meeting, end, parent = sys.argv[1:]
    die_with(int(parent))
    import torch

    from workers.engine.device.runner import ModelRunner, RunnerSettings
    from workers.engine.parallel.group import Member
    from workers.engine.parallel.runner import follow
    from workers.engine.parallel.wire import Channel

    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=int(end)))
    member = Member(1, 2, Path(meeting), "cpu")
    for line in sys.stdin:
        follow(ModelRunner(RunnerSettings(**json.loads(line)), member), channel)


if __name__ == "__main__":
    main()
