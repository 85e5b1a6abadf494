"""The CLI's own client of a running Headgate: plain HTTP with the operator's key. It knows no SQL and no prices."""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from accounting.values.tenant_types import Credentials
from gateway.base.home import Home
from gateway.cli.ready_file import Ready
from gateway.cli.server_place import CA, Server, given

PROJECTS = "/v1/organization/projects"
TIMEOUT_S = 30.0
_OF_PROXIES = (502, 503, 504)
"""The statuses with which proxies answer for a server that they do not reach."""
PAGE = 100
"""The most objects that the API gives at once."""


class ApiFailed(Exception):
    """One sentence that says why a call failed. `code` is the gateway's error code, if it answered."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class NotThere(ApiFailed):
    """The object does not exist, and the answer does not name it."""


class NotReached(ApiFailed):
    """A proxy answers for a server that it does not reach. What became of the request is not known."""


def segment(name: str) -> str:
    """Returns an id or a name as one segment of a path. Raises `ApiFailed` for one that would lead elsewhere."""
    if name in ("", ".", ".."):
        raise ApiFailed(f"{name!r} is neither an id nor a name.")
    return quote(name, safe="")


class _Fault(msgspec.Struct):
    message: str
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Fault


@dataclass(frozen=True)
class AdminApi:
    """The API of the server that runs in a home, or of HEADGATE_URL."""

    home: Path

    @property
    def url(self) -> str:
        """The server's base URL as people know it. Raises ApiFailed."""
        return self.server.url

    @cached_property
    def server(self) -> Server:
        """`HEADGATE_URL`, otherwise the server that runs in this home. Raises ApiFailed."""
        told = os.environ.get("HEADGATE_URL")
        if not told:
            return _server(Home(self.home))
        found = given(told)
        if found is None:
            raise ApiFailed(f"HEADGATE_URL = {told[:80]!r} is not a base URL: write it like http://127.0.0.1:8080.")
        return found

    @cached_property
    def _names(self) -> dict[str, str]:
        """The names of the tenants that were asked for, by id."""
        return {}

    @cached_property
    def key(self) -> str:
        """`HEADGATE_API_KEY` if it is an admin key, otherwise the home's key. Raises ApiFailed."""
        return _key(Home(self.home))

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: dict[str, Any] | None = None,
        *,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Returns the answer's JSON object. Raises ApiFailed."""
        return self._object(asyncio.run(self._call(method, path, body, params, headers or {})))

    def fetch(self, path: str, content_type: str) -> bytes:
        """Returns a document unchanged. Raises ApiFailed."""
        return asyncio.run(self._call("GET", path, None, None, {"accept": content_type}))

    def ready(self) -> dict[str, Any]:
        """Returns the answer of the probe, whether the gateway takes traffic or not. Raises ApiFailed."""
        return self._object(asyncio.run(self._call("GET", "/readyz", None, None, None)))

    def read(self, path: str, query: dict[str, Any]) -> Any:
        """Returns an object, or all objects of a list, read page by page. A `limit` bounds all pages together."""
        most = query.pop("limit", math.inf)
        page = self.call("GET", path, params=query if most == math.inf else {**query, "limit": min(PAGE, most)})
        if page.get("object") != "list":
            return page
        found: list[dict[str, Any]] = page["data"]
        while page.get("has_more") and len(found) < most:
            further = {"after": found[-1]["id"], "limit": min(PAGE, most - len(found))}
            page = self.call("GET", path, params=query | further)
            found += page["data"]
        return found

    def project(self, name_or_id: str, *, archived: bool = False) -> dict[str, Any]:
        """Finds a project by id, or by its name if only one project has it. `archived` includes archived projects."""
        if name_or_id.startswith("proj_"):
            return self._of_id(f"{PROJECTS}/{segment(name_or_id)}", name_or_id)
        every: list[dict[str, Any]] = self.read(PROJECTS, {"include_archived": str(archived).lower()})
        found = [p for p in every if p["name"] == name_or_id]
        if len(found) != 1:
            how_many = "No tenant is" if not found else f"{len(found)} tenants are"
            raise ApiFailed(f"{how_many} called {name_or_id!r}; `headgate tenants list` shows the ids.")
        return found[0]

    def billed(self, name_or_id: str) -> str:
        """Returns the id of a tenant, also of a deleted one if it is named by its id: the books have its charges."""
        if not name_or_id.startswith("proj_"):
            return str(self.project(name_or_id)["id"])
        return str(self._of_id(f"/admin/v1/tenants/{segment(name_or_id)}/billing", name_or_id)["project_id"])

    def _of_id(self, path: str, tenant_id: str) -> dict[str, Any]:
        try:
            return self.call("GET", path)
        except NotThere:
            raise ApiFailed(f"No tenant has the id {tenant_id!r}; `headgate tenants list` shows the ids.") from None

    def named(self, answer: Any) -> Any:
        """Returns the answer with `tenant` next to each `project_id`: the name that people know. `every` stands for all."""
        found = [one for one in (answer if isinstance(answer, list) else [answer]) if "project_id" in one]
        wanted = {one["project_id"] for one in found if one["project_id"]}
        if not wanted <= self._names.keys():
            read = {one["id"]: one["name"] for one in self.read(PROJECTS, {"include_archived": "true"})}
            self._names.update({one: one for one in wanted} | read)
        for one in found:
            one["tenant"] = self._names.get(one["project_id"]) or "every"
        return answer

    async def _call(
        self, method: str, path: str, body: Any, params: dict[str, Any] | None, more_headers: dict[str, str] | None
    ) -> bytes:
        """Makes a call with the operator's key, or a probe, which has no headers and whose 503 is an answer, too."""
        url = self.server.base + path
        headers = None if more_headers is None else {"authorization": f"Bearer {self.key}", **more_headers}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=self.server.connector(), headers=headers, timeout=timeout) as session,
                session.request(method, url, json=body, params=params) as answer,
            ):
                check_is_headgate(self.url, answer)
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._silent(error) from None
        if answer.status != 200 and (headers is not None or answer.status != 503):
            raise refusal(self.url, answer.status, content)
        return content

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise self._silent(error) from None

    def _silent(self, error: Exception) -> ApiFailed:
        return distrusted(self.url, error) or silent(self.url, _why(error))


class TenantApi(AdminApi):
    """The same API with a tenant's key: `HEADGATE_API_KEY` if it is one, otherwise that of the home's first start."""

    @cached_property
    def key(self) -> str:
        """Raises ApiFailed."""
        return _tenant_key(Home(self.home))


def _why(error: Exception) -> str:
    """Returns the system's own words for a failed connection: the client's name its internals beside them."""
    if isinstance(error, TimeoutError):
        return f"it took more than {TIMEOUT_S:g} s"
    if isinstance(error, msgspec.DecodeError):
        return "something else answers there"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None:
        return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    return str(error) or type(error).__name__


def distrusted(url: str, error: Exception) -> ApiFailed | None:
    """Returns the sentence about a certificate that is refused, or None for another error."""
    if not isinstance(error, aiohttp.ClientConnectorCertificateError):
        return None
    cause = error.certificate_error
    why = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else cause
    return ApiFailed(
        f"The certificate of {url} is refused: {why}. {CA} names a file with the authority that it is known by."
    )


def silent(url: str, why: str) -> ApiFailed:
    said = why.rstrip(".")
    return ApiFailed(f"No Headgate answers at {url}: {said}. Start it with `headgate up`, or set HEADGATE_URL.")


def check_is_headgate(url: str, answer: aiohttp.ClientResponse) -> None:
    """Raises `ApiFailed` for the answer of another server: every answer of Headgate has a request id of ours. That of a
    proxy is `NotReached`."""
    if answer.headers.get("x-request-id", "").startswith("req_"):
        return
    said = f"Something answers at {url} with status {answer.status}, and is not Headgate"
    if answer.status in _OF_PROXIES:
        raise NotReached(
            f"{said}: a proxy that reaches none, for example. See that it runs there, or set HEADGATE_URL."
        )
    raise ApiFailed(f"{said}. Start it with `headgate up`, or set HEADGATE_URL.")


def refusal(url: str, status: int, content: bytes) -> ApiFailed:
    """Returns the sentence of an answer with an error."""
    try:
        refused = msgspec.json.decode(content, type=_Refusal).error
    except msgspec.DecodeError:
        return silent(url, f"something else answers there, with status {status}")
    nameless = status == 404 and refused.code is None
    return (NotThere if nameless else ApiFailed)(refused.message, refused.code)


def running(home: Home) -> Ready | None:
    """Returns what runs in a home, or None if nothing does. Raises `ApiFailed`."""
    try:
        return msgspec.json.decode(home.ready.read_bytes(), type=Ready)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ApiFailed(
            f"The file {home.ready} cannot be read: {error.strerror}. Run the command as its owner, or set HEADGATE_URL."
        ) from None
    except msgspec.MsgspecError:
        raise ApiFailed(f"The file {home.ready} is damaged: restart `headgate up`.") from None


def _server(home: Home) -> Server:
    ready = running(home)
    if ready is None:
        what = "Nothing runs in" if home.is_there else "There is no home in"
        raise ApiFailed(
            f"{what} {home.root}. Set HEADGATE_URL to a gateway that runs by itself or elsewhere, name another home with --home, or start"
            " this one with `headgate up`."
        )
    return Server(ready.base_url, ready.socket)


def _key(home: Home) -> str:
    given = os.environ.get("HEADGATE_API_KEY", "")
    if given.startswith("hg_admin_"):
        return given
    if (stored := _stored(home)) is None:
        raise ApiFailed(
            f"There is no admin key: set HEADGATE_API_KEY to one, or use a home with {home.credentials.name}."
        )
    return stored.admin_key


def _tenant_key(home: Home) -> str:
    given = os.environ.get("HEADGATE_API_KEY", "")
    if given and not given.startswith("hg_admin_"):
        return given
    if (stored := _stored(home)) is None:
        raise ApiFailed(
            f"There is no tenant's key: set HEADGATE_API_KEY to one, or use a home with {home.credentials.name}."
            " An admin key runs no inference."
        )
    return stored.api_key


def _stored(home: Home) -> Credentials | None:
    """Returns the keys of the home's first start, or None if they cannot be read."""
    try:
        return msgspec.json.decode(home.credentials.read_bytes(), type=Credentials)
    except (OSError, msgspec.MsgspecError):
        return None
