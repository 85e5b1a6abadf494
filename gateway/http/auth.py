"""Authentication: a key in a header becomes a `Principal`, or a constant 401 (security.md section 6).

Answers are remembered for at most 60 s, or an hour where each change raises the epoch, and all of them are forgotten
when the revocation epoch moves, so a revoked key is refused everywhere within 5 s. An address that sends many bad keys
gets 429 instead of 401 and locks nobody out: a well-formed key is always looked up, at a cost that `key_lookups`
bounds. It knows neither SQL nor how a key is hashed: those come in as functions.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice

from aiohttp import web
from multidict import CIMultiDictProxy

from accounting.values.types import Principal
from gateway.base import errors
from gateway.base.addresses import Network, networks, within
from gateway.base.buckets import Buckets
from gateway.http.key_lookups import LookupFailed

FRESH_S = 60.0
LASTING_S = 3600.0
"""The same for keys of which every change raises the epoch, as long as SQL returns the epoch. So 10,000 keys in use are
not looked up all the time.
"""
RENEW_S = 40.0
"""A key in use is looked up again in the background, before one of its requests would have to wait for it."""
OUTAGE_S = 600.0
"""While SQL does not answer, keys that were fresh when it stopped are accepted for this time."""
LOOKED_AT = 100
"""The number of keys, those remembered last, of which one has to be acceptable for this process to serve without SQL."""
MAX_REMEMBERED = 50_000
MAX_UNKNOWN = 10_000
"""Unknown keys are kept apart, so that invented keys push out no real one."""
BAD_KEYS_BURST = 60
BAD_KEYS_PER_S = 1.0
MAX_KEY_CHARS = 256

_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([!-~]+)")
Headers = CIMultiDictProxy[str]


def presented_key(headers: Headers) -> str | None:
    """Returns the one key of a request; None when there is no key, a malformed one, or two different ones."""
    found: set[str] = set(headers.getall("x-api-key", ())) | set(headers.getall("api-key", ()))
    for value in headers.getall("authorization", ()):
        match = _BEARER.fullmatch(value.strip())
        found.add(match[1] if match else "")
    if len(found) != 1:
        return None
    key = found.pop()
    return key if 0 < len(key) <= MAX_KEY_CHARS and key.isascii() else None


@dataclass(frozen=True, slots=True)
class _Known:
    principal: Principal | None
    loaded: float
    networks: tuple[Network, ...] | None = None
    """The networks that the key may be used from; None means anywhere."""
    is_lasting: bool = False

    @classmethod
    def of(cls, principal: Principal | None, loaded: float, *, is_lasting: bool) -> _Known:
        listed = principal.addresses if principal else None
        return cls(principal, loaded, None if listed is None else networks(listed), is_lasting)

    def principal_at(self, address: str, now: float) -> Principal | None:
        """Returns the principal, or None if it has expired or may not be used from this address."""
        principal = self.principal
        if principal is None or (principal.expires_at is not None and principal.expires_at <= now):
            return None
        return principal if self.networks is None or within(address, self.networks) else None


def _network(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    return str(ipaddress.ip_network((ip, 64), strict=False)) if ip.version == 6 else address


class Authenticator:
    """Authenticates requests. There is one per process."""

    def __init__(
        self,
        lookup: Callable[[str], Awaitable[Principal | None]],
        well_formed: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        is_lasting: Callable[[str], bool] = lambda key: False,
    ) -> None:
        """`lookup` asks SQL and raises `LookupFailed`; `well_formed` checks shape and checksum without it; `is_lasting`
        says of a key that was found whether every change of its rights raises the epoch.
        """
        self._is_lasting = is_lasting
        self._lookup = lookup
        self._well_formed = well_formed
        self._clock = clock
        self._wall = wall
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._unknown: OrderedDict[bytes, _Known] = OrderedDict()
        """The keys that the lookup did not find."""
        self._asking: dict[bytes, asyncio.Task[_Known]] = {}
        """The running lookups. A key has one at a time, however many requests wait for it."""
        self._bad_keys = Buckets(BAD_KEYS_BURST, BAD_KEYS_PER_S, clock)
        """Bad keys empty the bucket of their address (IPv6: of its /64)."""
        self._epoch: int | None = None
        self._confirmed = clock()
        """The time at which SQL last returned the epoch."""

    def saw_epoch(self, epoch: int) -> None:
        """Takes the epoch read from SQL. If it differs from the one before, nothing remembered is valid any more."""
        if epoch != self._epoch:
            self.forget()
            self._epoch = epoch
        self._confirmed = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since SQL last answered."""
        return self._clock() - self._confirmed

    @property
    def serves_without_sql(self) -> bool:
        """Returns True if some key is remembered that is accepted while SQL does not answer."""
        if self.silent_s > OUTAGE_S:
            return False
        latest = islice(reversed(self._known.values()), LOOKED_AT)
        return any(known.principal is not None and self._was_fresh(known) for known in latest)

    def forget(self) -> None:
        """Forgets all answers because a revocation was announced. A lookup under way may have read the
        state before it.
        """
        self._known.clear()
        self._unknown.clear()
        self._asking.clear()

    async def authenticate(self, headers: Headers, address: str) -> Principal:
        """Returns the principal. Raises `ApiError`: 401, 429 for a bad key from an address with too many of them, 503
        if SQL is needed and does not answer.
        """
        key = presented_key(headers)
        # A plain hash is enough for a name in memory; the keyed hash is in SQL.
        name = hashlib.blake2b(key.encode(), digest_size=16).digest() if key else b""
        known = self._known.get(name) or self._unknown.get(name)
        if known is None or not self._believes(known):
            known = await self._ask(key, name, known) if key and self._well_formed(key) else None
        elif key and known.principal is not None and self._age(known) >= RENEW_S * self._stretch(known):
            self._begin_lookup(key, name)
        principal = known.principal_at(address, self._wall()) if known else None
        if principal is None:
            raise self._refusal(address)
        return principal

    def _refusal(self, address: str) -> errors.ApiError:
        network = _network(address)
        if blocked_ms := self._bad_keys.blocked_ms(network):
            return errors.too_many("This address sent too many requests with an incorrect API key.", blocked_ms)
        self._bad_keys.take(network)
        return errors.unauthorized()

    def _believes(self, known: _Known) -> bool:
        return self._age(known) < FRESH_S * self._stretch(known)

    def _stretch(self, known: _Known) -> float:
        """Returns how many times as long an answer is believed because the epoch is known."""
        return LASTING_S / FRESH_S if known.is_lasting and self.silent_s < FRESH_S else 1.0

    def _age(self, known: _Known) -> float:
        return self._clock() - known.loaded

    async def _ask(self, key: str, name: bytes, known: _Known | None) -> _Known:
        try:
            self._begin_lookup(key, name)
            return await asyncio.shield(self._asking[name])
        except LookupFailed:
            return self._during_outage(known)

    def _begin_lookup(self, key: str, name: bytes) -> None:
        if name not in self._asking:
            task = self._asking[name] = asyncio.create_task(self._read(key, name))
            # Perhaps no request waits for it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _read(self, key: str, name: bytes) -> _Known:
        this = asyncio.current_task()
        try:
            found = await self._lookup(key)
            lasting = found is not None and self._is_lasting(key)
            known = _Known.of(found, self._clock(), is_lasting=lasting)
            if self._asking.get(name) is this:
                self._remember(name, known)
            return known
        finally:
            if self._asking.get(name) is this:
                del self._asking[name]

    def _remember(self, name: bytes, known: _Known) -> None:
        self._known.pop(name, None)
        self._unknown.pop(name, None)
        is_key = known.principal is not None
        kept, most = (self._known, MAX_REMEMBERED) if is_key else (self._unknown, MAX_UNKNOWN)
        kept[name] = known
        if len(kept) > most:
            kept.popitem(last=False)

    def _was_fresh(self, known: _Known) -> bool:
        """Says whether the answer was believed when SQL last answered."""
        return self._confirmed - known.loaded < (LASTING_S if known.is_lasting else FRESH_S)

    def _during_outage(self, known: _Known | None) -> _Known:
        if known is None or not self._was_fresh(known) or self._clock() - self._confirmed > OUTAGE_S:
            raise errors.unavailable("database_unavailable", "The key cannot be checked now.")
        return known


AUTH = web.AppKey("auth", Authenticator)


PRINCIPAL = web.RequestKey("principal", Principal)
