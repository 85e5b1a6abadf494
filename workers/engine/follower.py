"""`python -m workers.engine.follower` is the process of one rank other than 0. `Ranks` starts it, and nobody starts it
by hand.

It reads the same environment as the worker. It ends when rank 0 says so, when it fails (then it sends the reason), or
when rank 0 is dead. In the last case it ends whatever it is doing, because a collective cannot be woken. It ignores
signals to the whole process group: rank 0 handles them and drains.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path

from workers.engine import settings
from workers.engine.parallel.wire import Channel, Ended, frame
from workers.engine.untraced import untraced
from workers.engine.values.errors import StartError
from workers.process import logs
from workers.process.children.parent import die_with

logger = logging.getLogger("workers.engine.follower")

EXIT_CONFIG, EXIT_BROKEN = 78, 2


def main(arguments: list[str]) -> int:
    rank, size, end, meeting, parent = arguments
    die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(end)))
    try:
        told = settings.load()
        logs.configure(told.log_level, worker=f"{told.worker}/rank-{rank}")
        serve(told, int(rank), int(size), Path(meeting), channel)
    except StartError as error:
        channel.send(frame(Ended(str(error), EXIT_CONFIG)))
        return EXIT_CONFIG
    except Exception as error:  # the process's outermost frame: rank 0 must learn the reason
        logger.exception("rank %s failed", rank, extra={"event": "rank_failed"})
        sentence = f"Rank {rank} of {size} failed: {' '.join(str(error).split())[:300]}."
        channel.send(frame(Ended(sentence, EXIT_BROKEN)))
        return EXIT_BROKEN
    return 0


def serve(told: settings.WorkerSettings, rank: int, size: int, meeting: Path, channel: Channel) -> None:
    """Loads this rank's part and follows rank 0. This imports torch, which takes seconds."""
    with untraced():
        from workers.engine.loading import load
    from workers.engine.parallel.runner import follow

    follow(load(told, rank, size, meeting), channel)


if __name__ == "__main__":
    # The process ends at once, and does not wait for threads that a broken process group still holds.
    os._exit(main(sys.argv[1:]))
