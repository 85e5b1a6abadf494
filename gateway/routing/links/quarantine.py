"""Requests that may have killed a worker, and those that have (security.md F24b).

When the link to a worker ends, each request that was in its first steps there is a suspect. A suspect that is sent
again runs where no other suspect is in its first steps; one that gets through these is a suspect no more. A request under
which a second process ended is refused for some minutes, or after the third if others began beside it each time: then
one of them may have been the cause. A link that the worker closed is taken for the end of its process at once. One that
this gateway cut, because it heard nothing, counts when another process is linked in the worker's place. If the same
process is linked again and its engine steps, nothing had ended. Only the same tenant's same prompt is the same request,
so nobody's request is refused for somebody else's.

Nothing here is kept when the gateway ends. While no worker has died, a request costs one look at an empty table.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

FIRST_TOKENS = 16
"""A request of which a choice has so many tokens is past its first steps."""
ENOUGH, ENOUGH_BESIDE_OTHERS = 2, 3
MAX_SUSPECTS = 10_000
END_TOKENS = 4096
"""The tokens at each end of a prompt that tell it from others. A worker that ends may have had thousands of long prompts."""


@dataclass
class _End:
    worker: str
    was_alone: bool
    """Whether the request was the only one in its first steps, as far as this gateway knows."""
    is_certain: bool


@dataclass
class _Suspect:
    until: float
    ends: dict[str, _End] = field(default_factory=dict)
    """The ends of links under the request, by the process of the worker."""

    @property
    def is_guilty(self) -> bool:
        certain = [end for end in self.ends.values() if end.is_certain]
        return len(certain) >= (ENOUGH if any(end.was_alone for end in certain) else ENOUGH_BESIDE_OTHERS)


class Quarantine:
    """The memory that one gateway has of requests and the workers that ended under them."""

    def __init__(self, hold_s: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        """A suspect is forgotten `hold_s` seconds after the last process that ended under it. With 0 nobody is suspected."""
        self._hold_s = hold_s
        self._clock = clock
        self._suspects: dict[bytes, _Suspect] = {}
        self._reserved: Counter[str] = Counter()

    @property
    def is_empty(self) -> bool:
        if self._suspects:
            self._forget_old()
        return not self._suspects

    def counts(self) -> tuple[int, int]:
        """Returns how many requests are suspects, and how many of these are refused."""
        self._forget_old()
        return len(self._suspects), sum(suspect.is_guilty for suspect in self._suspects.values())

    def is_suspect(self, request: bytes) -> bool:
        return self._suspect(request) is not None

    def is_guilty(self, request: bytes) -> bool:
        suspect = self._suspect(request)
        return suspect is not None and suspect.is_guilty

    def link_ended(self, worker: str, process: str, first: Collection[bytes], *, is_certain: bool) -> None:
        """Notes the requests that were in their first steps. `is_certain`: the process ended, and not the link alone."""
        if not self._hold_s:
            return
        until = self._clock() + self._hold_s
        for request in first:
            suspect = self._suspects.pop(request, None) or _Suspect(until)
            suspect.until = until
            suspect.ends[process] = _End(worker, len(first) == 1, is_certain)
            self._suspects[request] = suspect  # the newest is the last
        for request in list(self._suspects)[: -MAX_SUSPECTS or None]:
            del self._suspects[request]

    def linked(self, worker: str, process: str) -> None:
        """Notes that other processes that had the worker's name have ended."""
        for suspect in self._suspects.values():
            for known, end in suspect.ends.items():
                end.is_certain = end.is_certain or (end.worker == worker and known != process)

    def lives(self, process: str) -> None:
        """Takes back what was noted of a process that goes on."""
        for request, suspect in list(self._suspects.items()):
            if suspect.ends.pop(process, None) is not None and not suspect.ends:
                del self._suspects[request]

    def passed(self, request: bytes) -> None:
        """Clears a request that has got through its first steps."""
        self._suspects.pop(request, None)

    @contextmanager
    def reserved(self, worker: str) -> Iterator[None]:
        """Keeps other suspects from a worker until this one has been sent to it."""
        self._reserved[worker] += 1
        try:
            yield
        finally:
            self._reserved[worker] -= 1

    def is_reserved(self, worker: str) -> bool:
        return self._reserved[worker] > 0

    def _suspect(self, request: bytes) -> _Suspect | None:
        self._forget_old()
        return self._suspects.get(request)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._suspects:
            request, oldest = next(iter(self._suspects.items()))
            if oldest.until > now:
                return
            del self._suspects[request]


def fingerprint(tenant: str, model: str, adapter: str, prompt: array[int]) -> bytes:
    """Returns what tells whether a request is the same as an earlier one. A longer prompt takes no longer than one of
    2 * `END_TOKENS` tokens.
    """
    digest = hashlib.blake2b("\0".join((tenant, model, adapter, str(len(prompt)))).encode(), digest_size=16)
    digest.update(prompt[:END_TOKENS])
    digest.update(prompt[END_TOKENS:][-END_TOKENS:])
    return digest.digest()
