"""`headgate requests follow`: lines of requests that end from now on, with names that are read once."""

from __future__ import annotations

import itertools
from typing import Any

from gateway.cli import requests
from gateway.cli.api import AdminApi
from gateway.cli.requests import _as_they_end


class Api(AdminApi):
    """A server with a log of requests, the newest first."""

    def __init__(self, num_logged: int) -> None:
        self.logged = [{"id": f"req_{number}", "project_id": "proj_a"} for number in reversed(range(num_logged))]
        self.num_read = 0

    def call(self, method: str, path: str, body: Any = None, params: Any = None, **_: Any) -> dict[str, Any]:
        first = next((at for at, one in enumerate(self.logged, 1) if one["id"] == params.get("after")), 0)
        page = self.logged[first : first + params["limit"]]
        more = len(self.logged) > first + len(page)
        return {"data": page, "has_more": more, "last_id": page[-1]["id"] if page else None}

    def read(self, path: str, query: dict[str, Any]) -> Any:
        self.num_read += 1
        return [{"id": "proj_a", "name": "acme"}]


def test_only_requests_that_end_from_now_on_are_followed(monkeypatch):
    api, num_looks = Api(700), 0

    def look_again(_: float) -> None:
        nonlocal num_looks
        num_looks += 1
        assert num_looks < 10
        api.logged.insert(0, {"id": f"req_{len(api.logged)}", "project_id": "proj_a"})

    monkeypatch.setattr(requests.time, "sleep", look_again)
    found = itertools.islice(_as_they_end(api, {}, 1.0), 3)
    assert [one["id"] for one in found] == ["req_700", "req_701", "req_702"]


def test_names_of_tenants_are_read_again_only_for_an_unknown_one():
    api = Api(0)
    assert [api.named({"project_id": "proj_a"})["tenant"] for _ in range(3)] == ["acme"] * 3
    assert api.num_read == 1
    assert [api.named({"project_id": "proj_b"})["tenant"] for _ in range(3)] == ["proj_b"] * 3
    assert api.num_read == 2
