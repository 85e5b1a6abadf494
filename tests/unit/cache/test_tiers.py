"""Row B6: what a slot of a full host tier costs does not depend on how many tenants there are, or ever were."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from cache.host.tiers import HostTier


def write(host: HostTier, tenant: str, first: int, number: int) -> int:
    """Blocks of its own, of one token each. Returns how many got a slot."""
    node = SimpleNamespace(
        region=tenant.encode(), tenant=tenant, block_ids=range(number), tokens=range(first, first + number)
    )
    return len(host.write([node]))


def full(num_tenants: int, num_slots: int) -> HostTier:
    """The last of the tenants hold a block or two each, all others wrote and have nothing any more."""
    host = HostTier(num_slots, 1)
    for index in range(num_tenants):
        write(host, f"t{index}", 0, 1)
        if index < num_tenants - num_slots:
            host.purge(f"t{index}")
    write(host, f"t{num_tenants - 1}", 0, 2)
    assert host.num_free == 0
    return host


def lines_of_taking(host: HostTier, number: int) -> int:
    """Lines of Python that are run while a new tenant takes so many slots from others."""
    lines = 0

    def count(_frame: object, event: str, _arg: object) -> object:
        nonlocal lines
        lines += event in ("line", "call")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for index in range(number):
            write(host, "new", 10 * index, 1)
    finally:
        sys.settrace(before)
    return lines


def test_a_slot_costs_as_much_among_many_tenants_as_among_few() -> None:
    few, many = (full(number, number) for number in (100, 20_000))
    for host in (few, many):  # whatever is brought up to date once
        write(host, "before", 0, 1)
    assert lines_of_taking(many, 64) <= 2 * lines_of_taking(few, 64)
    assert list(few.broken()) == []


def test_a_slot_costs_as_much_behind_a_long_public_prefix_that_others_hang_on() -> None:
    """Whoever has the most has copies that cannot go: they are not looked at each time."""

    def taking(length: int) -> int:
        host = HostTier(length + 8, 1)
        public = SimpleNamespace(region=b"p", tenant="operator", block_ids=range(length), tokens=range(length))
        for index in range(8):
            own = SimpleNamespace(region=b"p/%d" % index, tenant=f"t{index}", block_ids=[0], tokens=[index])
            assert len(host.write([public, own])) == (length + 1 if index == 0 else 1)
        write(host, "before", 0, 1)
        return lines_of_taking(host, 16)

    assert taking(2_000) <= 2 * taking(20)


def test_a_tenant_without_slots_and_quota_is_forgotten() -> None:
    host = full(200, 10)
    assert len(host._owners) <= 10
    host.set_quota("t0", 3)
    host.set_quota("unknown", None)
    assert len(host._owners) <= 11
    host.set_quota("t0", None)
    assert len(host._owners) <= 10
    assert list(host.broken()) == []


def test_tenants_that_came_and_went_while_slots_were_free_leave_nothing() -> None:
    host = HostTier(10, 1)
    for index in range(200):
        write(host, f"t{index}", 0, 2)
        host.purge(f"t{index}")
    assert not host._owners._changed
    assert list(host.broken()) == []


def test_of_two_that_have_the_most_the_first_by_name_gives_a_slot_up() -> None:
    host = HostTier(4, 1)
    for tenant in ("bert", "anna"):
        write(host, tenant, 0, 2)
    assert write(host, "carl", 0, 1) == 1
    assert (host.num_of("anna"), host.num_of("bert")) == (1, 2)
