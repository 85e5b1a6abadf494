"""Which worker gets a request: one of its model that takes work, with the least load. Pure choice over links.

Prefix affinity (engine.md section 6) will come in front of the load; the signature is ready for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from gateway import errors
from gateway.upstream.native import WorkerLink


class Router:
    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(
        self, links: Iterable[WorkerLink], model: str, avoid: Collection[str] = ()
    ) -> WorkerLink:
        """Raises `ApiError` 503 when no worker takes work. Ties go round."""
        able = [
            link for link in links
            if link.registration.model == model and link.takes_work and link.registration.worker not in avoid
        ]  # fmt: skip
        if not able:
            raise errors.unavailable("overloaded", "No worker for this model is ready.", 1000)
        least = min(link.load for link in able)
        equal = sorted(
            (link for link in able if link.load == least), key=lambda link: link.registration.worker
        )
        return equal[next(self._turn) % len(equal)]
