"""The person who looks at a page: the session, the role that the key's scopes give, and calls of the API with that key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web
from yarl import URL

from accounting.values.types import Principal
from gateway.base import errors
from gateway.console import calls
from gateway.console.sessions import Session
from gateway.console.tables import MAX_EXPORTED_ROWS, check_format

CALL_ROWS = 100
"""The rows of a page of the API's lists, at most."""
MAX_CALLS = 2 * MAX_EXPORTED_ROWS // CALL_ROWS
"""The calls for one file. A page of the request log has few rows where a filter without an index leaves most out."""
Role = Literal["operator", "finance", "admin", "viewer"]
"""`operator` and `finance` see all tenants, `admin` and `viewer` their own; `finance` and `viewer` change nothing."""

ROLE_NAMES: dict[Role, str] = {
    "operator": "Operator",
    "finance": "Finance (read-only)",
    "admin": "Tenant",
    "viewer": "Tenant (read-only)",
}


def role_of(principal: Principal) -> Role:
    if principal.kind == "operator":
        return "operator" if "admin" in principal.scopes else "finance"
    return "admin" if principal.scopes - {"usage:read", "files:read"} else "viewer"


@dataclass(frozen=True, slots=True)
class Viewer:
    request: web.Request
    session: Session
    principal: Principal

    @property
    def role(self) -> Role:
        return role_of(self.principal)

    @property
    def sees_all(self) -> bool:
        return self.principal.kind == "operator"

    @property
    def may_change(self) -> bool:
        return self.role in {"operator", "admin"}

    def own(self, path: str) -> str:
        """Returns the path under which the API has this of all tenants, or of the viewer's own."""
        return f"/admin/v1/{path}" if self.sees_all else f"/v1/{path}"

    async def listed(
        self, path: str, page_rows: int, after_name: str = "after", *, table: str | None = None, **query: Any
    ) -> Mapping[str, Any]:
        """Returns one page of a list of the API, the one behind the value of `?after=`, or of another name. For a file
        it is the whole list; where a page has several, only that of the `table` that `?table=` names. Raises `Refused`,
        and `ApiError` 400 for a list that is longer than a file may be.
        """
        wanted = self.request.query.get("format")
        is_other = table is not None and self.request.query.get("table", table) != table
        if not wanted or is_other:
            page: Mapping[str, Any] = await self.get(
                path, limit=page_rows, after=self.request.query.get(after_name), **query
            )
            return page
        check_format(wanted)
        rows: list[Any] = []
        after = None
        for _ in range(MAX_CALLS):
            found = await self.get(path, limit=CALL_ROWS, after=after, **query)
            rows += found["data"]
            if len(rows) > MAX_EXPORTED_ROWS:
                break
            if not found["has_more"]:
                return {**found, "data": rows}
            after = found["last_id"]
        raise errors.invalid(
            f"A file has at most {MAX_EXPORTED_ROWS:,} rows, and there are more, or they lie too far apart in the list. "
            "Narrow the filters, for example by time.",
            "format",
        )

    async def get(self, path: str, **query: Any) -> Any:
        """Returns the API's answer to a GET. Raises `Refused`."""
        return await self._call("GET", path, query)

    async def post(self, path: str, body: Any, **query: Any) -> Any:
        return await self._call("POST", path, query, body)

    async def post_once(self, path: str, body: Any, idempotency_key: str) -> Any:
        """Posts a body that takes effect once, however often its form is sent with the same key."""
        target = _target(path, {})
        return await calls.fetch(self.request, self.session.key, "POST", target, body, idempotency_key)

    async def patch(self, path: str, body: Any) -> Any:
        return await self._call("PATCH", path, {}, body)

    async def put(self, path: str, body: Any) -> Any:
        return await self._call("PUT", path, {}, body)

    async def delete(self, path: str, **query: Any) -> Any:
        return await self._call("DELETE", path, query)

    async def forward(
        self, method: str, path: str, data: bytes = b"", content_type: str = "application/json", **query: Any
    ) -> web.StreamResponse:
        """Returns the API's own answer for the browser: a download or a stream."""
        return await calls.forward(self.request, self.session.key, method, _target(path, query), data, content_type)

    async def download(self, path: str, **query: Any) -> web.StreamResponse:
        """Returns a file of the API for the browser. Raises `Refused`, so that a refusal is a page and no file."""
        answer = await self.forward("GET", path, **query)
        if answer.status >= 400:
            calls.decoded(answer)
        return answer

    async def _call(self, method: str, path: str, query: dict[str, Any], body: Any = None) -> Any:
        return await calls.fetch(self.request, self.session.key, method, _target(path, query), body)


def _target(path: str, query: dict[str, Any]) -> URL:
    """Returns an address of the API. The parts of the path are quoted, so that a name with a slash is one part."""
    return URL.build(path=path, query=calls.query_of(query), encoded=True)
