"""Which worker gets a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.router import Router
from workers.protocol.registry import Registration


@dataclass
class Link:
    name: str
    load: int = 0
    takes_work: bool = True
    model: str = "m"

    @property
    def registration(self) -> Registration:
        return Registration(self.name, "p", "", self.model, "r", 1)


def choose(router: Router, *links: Link, **more: Any) -> str:
    return router.choose(links, "m", **more).registration.worker  # type: ignore[arg-type]


def test_the_least_loaded_worker_of_the_model_is_chosen() -> None:
    links = Link("a", 5), Link("b", 2), Link("c", 0, model="other"), Link("d", 0, takes_work=False)
    assert choose(Router(), *links) == "b"
    assert choose(Router(), *links, avoid={"b"}) == "a"


def test_equal_workers_take_turns() -> None:
    router = Router()
    assert {choose(router, Link("a"), Link("b"), Link("c")) for _ in range(3)} == {"a", "b", "c"}


def test_without_a_worker_it_is_503() -> None:
    with pytest.raises(ApiError) as refusal:
        choose(Router(), Link("a", takes_work=False))
    assert (refusal.value.status, refusal.value.code) == (503, "overloaded")
    assert "retry-after" in refusal.value.headers
