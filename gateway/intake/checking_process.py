"""The process that checks large bodies for a gateway: it reads a body from its link, and answers with what `check` says.
`body_checker` is the gateway's half. It loads little, so that it starts soon and takes little memory.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Connection

import msgspec

from gateway.base import errors
from gateway.intake.json_body import check
from gateway.intake.json_pieces import Cut
from workers.process.children.parent import die_with
from workers.process.turns import step_back

NICENESS = 10
"""It takes cores that nobody else wants, and a tenth of one where all are wanted: a body of 110 KB, which takes 1 ms at rest,
is checked in 4 to 110 ms there.
"""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An `ApiError` that `check` raised."""

    status: int
    message: str
    code: str | None
    param: str | None


class Sound(msgspec.Struct, frozen=True, tag=True):
    cuts: list[Cut]


def answer(body: bytes) -> Refused | Sound:
    try:
        return Sound(check(body))
    except errors.ApiError as error:
        return Refused(error.status, error.message, error.code, error.param)


def serve(link: Connection) -> None:
    """Says that it is ready, and answers until the gateway closes the link."""
    link.send_bytes(b"ready")
    while True:
        try:
            body = link.recv_bytes()
        except (EOFError, OSError):  # closed between two bodies, or within one
            return
        link.send_bytes(msgspec.msgpack.encode(answer(body)))


def main() -> None:
    die_with(int(sys.argv[1]))
    step_back(NICENESS)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(Connection(os.dup(0)))


if __name__ == "__main__":
    main()
