"""The authenticator alone, with a clock of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from accounting.values.types import Principal
from gateway.base.errors import ApiError
from gateway.http.auth import BAD_KEYS_BURST, Authenticator, LookupFailed, presented_key

GOOD = Principal(kind="tenant", tenant_id="t", key_id="k", scopes=frozenset({"chat"}), expires_at=2000)


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


class Bench:
    """An authenticator over a table, with hands on clock and database."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.keys: dict[str, Principal] = {"good": GOOD}
        self.num_lookups = 0
        self.down = False
        self.answers = asyncio.Event()
        """Unset: SQL takes its time."""
        self.answers.set()
        self.auth = Authenticator(self._lookup, lambda key: not key.startswith("!"), lambda: self.now, lambda: self.now)
        self.auth.saw_epoch(1)

    async def _lookup(self, key: str) -> Principal | None:
        self.num_lookups += 1
        found = self.keys.get(key)
        await self.answers.wait()
        if self.down:
            raise LookupFailed
        return found

    async def ask(self, key: str, address: str = "192.0.2.1") -> int:
        try:
            await self.auth.authenticate(headers(("authorization", f"Bearer {key}")), address)
        except ApiError as error:
            return error.status
        return 200


@pytest.mark.parametrize(
    ("pairs", "key"),
    [
        ([("authorization", "Bearer abc")], "abc"),
        ([("Authorization", "bEARER   abc ")], "abc"),
        ([("x-api-key", "abc")], "abc"),
        ([("api-key", "abc"), ("x-api-key", "abc")], "abc"),
        ([], None),
        ([("authorization", "Basic abc")], None),
        ([("api-key", "a"), ("x-api-key", "b")], None),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], None),
        ([("authorization", "Bearer a b")], None),
        ([("x-api-key", "")], None),
        ([("x-api-key", "x" * 300)], None),
        ([("x-api-key", "schlüssel")], None),
        ([("x-api-key", "a"), ("authorization", "junk")], None),
    ],
)
def test_one_key_is_found_or_none(pairs: Any, key: str | None) -> None:
    assert presented_key(headers(*pairs)) == key


async def test_a_known_key_is_not_looked_up_again_for_a_minute() -> None:
    bench = Bench()
    assert [await bench.ask("good") for _ in range(5)] == [200] * 5
    assert bench.num_lookups == 1
    bench.now += 61
    assert await bench.ask("good") == 200
    assert bench.num_lookups == 2


async def test_who_asks_at_the_same_time_waits_for_one_lookup() -> None:
    bench = Bench()
    bench.answers.clear()
    asking = [asyncio.create_task(bench.ask("good")) for _ in range(50)]
    await asyncio.sleep(0)
    asking[0].cancel()
    await asyncio.sleep(0)
    bench.answers.set()
    assert await asyncio.gather(*asking[1:]) == [200] * 49
    assert bench.num_lookups == 1


@pytest.mark.parametrize(("age", "num_lookups"), [(39, 1), (41, 2)])
async def test_a_key_in_use_is_looked_up_again_before_anybody_waits_for_it(age: float, num_lookups: int) -> None:
    bench = Bench()
    await bench.ask("good")
    bench.now += age
    bench.answers.clear()
    assert [await bench.ask("good") for _ in range(5)] == [200] * 5
    await asyncio.sleep(0)
    assert bench.num_lookups == num_lookups
    bench.answers.set()
    await asyncio.sleep(0.01)
    bench.now += 30
    assert await bench.ask("good") == 200
    assert bench.num_lookups == 2, "39 s: looked up now; 41 s: fresh since then"


async def test_a_lookup_behind_the_back_that_fails_changes_nothing() -> None:
    bench = Bench()
    await bench.ask("good")
    bench.now += 50
    bench.down = True
    assert [await bench.ask("good"), await bench.ask("good")] == [200, 200]
    await asyncio.sleep(0.01)
    bench.down = False
    assert await bench.ask("good") == 200
    await asyncio.sleep(0.01)
    bench.now += 50
    bench.answers.clear()
    assert await bench.ask("good") == 200, "renewed by the one that did not fail"
    bench.answers.set()


async def test_what_was_being_read_when_a_revocation_came_is_not_remembered() -> None:
    bench = Bench()
    await bench.ask("good")
    bench.now += 50
    bench.answers.clear()
    assert await bench.ask("good") == 200  # begins to read, before the revocation
    await asyncio.sleep(0)
    del bench.keys["good"]
    bench.auth.forget()
    later = asyncio.create_task(bench.ask("good"))
    await asyncio.sleep(0)
    bench.answers.set()
    assert await later == 401
    assert await bench.ask("good") == 401
    assert bench.num_lookups == 3


async def test_a_new_epoch_and_an_announcement_forget_everything() -> None:
    bench = Bench()
    await bench.ask("good")
    del bench.keys["good"]
    bench.auth.saw_epoch(1)
    assert await bench.ask("good") == 200
    bench.auth.saw_epoch(2)
    assert await bench.ask("good") == 401
    bench.keys["good"] = GOOD
    assert await bench.ask("good") == 401
    bench.auth.forget()
    assert await bench.ask("good") == 200


async def test_a_malformed_key_costs_no_lookup_and_an_unknown_one_a_single_one() -> None:
    bench = Bench()
    assert [await bench.ask("!bad") for _ in range(5)] == [401] * 5
    assert bench.num_lookups == 0
    assert [await bench.ask("unknown") for _ in range(5)] == [401] * 5
    assert bench.num_lookups == 1


async def test_a_key_expires_while_it_is_remembered() -> None:
    bench = Bench()
    bench.now = 1990
    assert await bench.ask("good") == 200
    bench.now = 2001
    assert await bench.ask("good") == 401


async def test_s5_bad_keys_block_their_address_for_bad_keys_only() -> None:
    bench = Bench()
    await bench.ask("good")
    bench.keys["other"] = GOOD
    statuses = [await bench.ask(f"bad{i}") for i in range(BAD_KEYS_BURST + 5)]
    assert statuses[0] == 401
    assert statuses[-1] == 429
    assert await bench.ask("good") == 200
    assert await bench.ask("!malformed") == 429
    assert await bench.ask("!malformed", "198.51.100.1") == 401
    assert await bench.ask("other") == 200, "S5: a key that nobody has asked for yet"
    bench.now += 30
    assert await bench.ask("bad") == 401


async def test_addresses_of_one_ipv6_network_share_a_bucket() -> None:
    bench = Bench()
    for i in range(BAD_KEYS_BURST + 2):
        await bench.ask(f"bad{i}", f"2001:db8::{i:x}")
    assert await bench.ask("another", "2001:db8::ffff") == 429
    assert await bench.ask("another", "2001:db8:1::1") == 401


async def test_without_sql_what_was_fresh_then_is_believed_for_ten_minutes() -> None:
    bench = Bench()
    await bench.ask("good")
    bench.now += 30
    bench.auth.saw_epoch(1)
    bench.down = True
    bench.now += 300
    assert await bench.ask("good") == 200
    assert await bench.ask("unknown") == 503
    bench.now += 400
    assert await bench.ask("good") == 503


async def test_what_was_stale_when_sql_went_is_not_believed() -> None:
    bench = Bench()
    await bench.ask("good")
    bench.now += 70
    bench.auth.saw_epoch(1)
    bench.down = True
    assert await bench.ask("good") == 503


async def test_a_key_whose_changes_raise_the_epoch_is_believed_for_an_hour_while_the_epoch_is_known() -> None:
    bench = Bench()
    bench.auth._is_lasting = lambda key: key == "good"
    bench.keys["good"] = msgspec.structs.replace(GOOD, expires_at=None)
    assert await bench.ask("good") == 200
    for _ in range(70):
        bench.now += 30
        bench.auth.saw_epoch(1)
        assert await bench.ask("good") == 200
    assert bench.num_lookups == 1
    bench.now += 61  # nobody knows whether the epoch has moved
    assert await bench.ask("good") == 200
    assert bench.num_lookups == 2


async def test_a_lasting_key_is_refused_once_the_epoch_has_moved() -> None:
    bench = Bench()
    bench.auth._is_lasting = lambda key: True
    assert await bench.ask("good") == 200
    del bench.keys["good"]
    bench.auth.saw_epoch(2)
    assert await bench.ask("good") == 401
