"""A browser without a screen: it keeps cookies, finds the token of a form, and sends forms as a browser would."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from html import unescape

import aiohttp
from gateways import RunningGateway

CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "


@dataclass
class Page:
    status: int
    path: str
    """Path and query at which the browser ended."""
    text: str
    headers: dict[str, str]

    @property
    def form_token(self) -> str:
        [*_, token] = re.findall(r'name="form_token" value="([0-9a-f]+)"', self.text)
        return token

    @property
    def words(self) -> str:
        """The text as it is read, without elements."""
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self.text)).split())


class Browser:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.last: Page | None = None

    async def get(self, path: str, *, redirects: bool = True, **headers: str) -> Page:
        async with self.session.get("/console" + path, allow_redirects=redirects, headers=headers) as answer:
            self.last = await _page(answer)
            return self.last

    async def submit(self, path: str, headers: dict[str, str] | None = None, **fields: str) -> Page:
        """Sends a form with the token of the page that was seen last."""
        if "form_token" not in fields and self.last is not None and 'name="form_token"' in self.last.text:
            fields["form_token"] = self.last.form_token
        async with self.session.post("/console" + path, data=fields, headers=headers) as answer:
            self.last = await _page(answer)
            return self.last

    async def sign_in(self, key: str) -> Page:
        await self.get("/sign-in")
        return await self.submit("/sign-in", key=key)


async def _page(answer: aiohttp.ClientResponse) -> Page:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return Page(answer.status, str(answer.url.relative()), (await answer.read()).decode("utf-8", "replace"), headers)


@contextlib.asynccontextmanager
async def browser(gateway: RunningGateway) -> AsyncIterator[Browser]:
    jar = aiohttp.CookieJar(unsafe=True)  # hosts that are IP addresses too
    async with aiohttp.ClientSession(gateway.url, cookie_jar=jar) as session:
        yield Browser(session)


@contextlib.asynccontextmanager
async def signed_in(gateway: RunningGateway, key: str | None = None) -> AsyncIterator[Browser]:
    """A browser in which somebody has signed in: the tenant of the gateway's own key, or the owner of `key`."""
    async with browser(gateway) as one:
        page = await one.sign_in(key or gateway.keys.api_key)
        assert page.status == 200, page.words
        yield one
