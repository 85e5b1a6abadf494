import math
from contextlib import closing

from workers.engine.queueing.fairness import MAX_REMEMBERED, MAX_RETURNING, RecentService, TenantOrder, VirtualCounters


def test_charges_count_output_double_cached_a_tenth_and_divide_by_the_weight():
    counters = VirtualCounters()
    counters.enter("a", 2.0)
    counters.charge("a", computed=10, cached=20, output=4)
    assert counters["a"] == (10 + 2 + 8) / 2


def test_a_tenant_that_becomes_active_is_lifted_to_the_smallest_active_counter():
    counters = VirtualCounters()
    counters.enter("a", 1.0)
    counters.enter("b", 1.0)
    counters.charge("a", computed=100)
    counters.charge("b", computed=40)
    counters.enter("late", 1.0)
    assert counters["late"] == 40


def test_leaving_and_coming_back_does_not_wipe_out_what_was_used():
    counters = VirtualCounters()
    counters.enter("a", 1.0)
    counters.enter("b", 1.0)
    counters.charge("a", computed=100)
    counters.leave("a")
    counters.enter("a", 1.0)
    assert counters["a"] == 100


def test_who_was_idle_may_be_behind_the_others_by_a_credit_and_no_more():
    counters = VirtualCounters(credit=30)
    counters.enter("busy", 1.0)
    counters.charge("busy", computed=100)
    for idle in ("new", "another"):
        counters.enter(idle, 1.0)
        assert counters["busy"] - counters[idle] == 30, "the credits of two add up"


def test_a_credit_grows_back_with_what_others_are_given_not_by_coming_and_going():
    counters = VirtualCounters(credit=30)
    counters.enter("busy", 1.0)
    counters.charge("busy", computed=100)
    for _ in range(5):
        counters.enter("a", 1.0)
        counters.charge("a", computed=10)
        counters.leave("a")
    assert counters["a"] - counters["busy"] == 20
    counters.charge("busy", computed=40)
    counters.enter("a", 1.0)
    assert counters["busy"] - counters["a"] == 20
    counters.leave("a")
    counters.charge("busy", computed=400)
    counters.enter("a", 1.0)
    assert counters["busy"] - counters["a"] == 30


def test_of_idle_tenants_only_so_many_are_remembered():
    counters = VirtualCounters(credit=1e9)
    for number in range(MAX_REMEMBERED + 500):
        counters.enter(f"t{number}", 1.0)
        counters.charge(f"t{number}", output=1)
        counters.leave(f"t{number}")
    assert len(counters._counters) <= MAX_REMEMBERED


def test_a_tenant_is_active_until_its_last_request_left():
    counters = VirtualCounters()
    for _ in range(2):
        counters.enter("a", 1.0)
    counters.charge("a", computed=10)
    counters.leave("a")
    counters.enter("b", 1.0)
    assert counters["b"] == 10


def test_idle_tenants_leave_nothing_behind():
    counters = VirtualCounters()
    for number in range(100):
        counters.enter(f"t{number}", 1.0)
        counters.charge(f"t{number}", output=5)
        counters.leave(f"t{number}")
    assert len(counters._counters) == 0


def named(order):
    with closing(order.smallest_first()) as tenants:
        return list(tenants)


def test_tenants_are_named_from_the_smallest_counter_up():
    counters = VirtualCounters()
    order = TenantOrder(counters)
    for tenant in "abc":
        counters.enter(tenant, 1.0)
        order.add(tenant)
    assert named(order) == ["a", "b", "c"]
    order.served("a")
    assert named(order) == ["b", "c", "a"]
    counters.charge("a", computed=5)
    counters.charge("b", computed=3)
    assert named(order) == named(order) == ["c", "b", "a"]
    order.discard("b")
    assert named(order) == ["c", "a"]


def test_what_was_charged_and_not_computed_is_given_back():
    counters = VirtualCounters()
    counters.enter("a", 2.0)
    counters.charge("a", computed=100)
    counters.refund("a", computed=60)
    assert counters["a"] == 20


def test_who_got_least_may_come_back_until_the_last_service_is_long_ago():
    recent = RecentService()
    assert recent.lightest(0.0) == math.inf
    recent.add("flood", 4000, 0.0)
    recent.add("rare", 10, 1.0)
    assert recent.lightest(1.0) == 10
    recent.add("flood", 4000, 12.0)
    assert recent.lightest(12.0) == recent.of("flood", 12.0) > 4000


def test_looking_for_the_lightest_costs_the_same_with_many_tenants():
    recent = RecentService()
    recent.add("rare", 1, 0.0)
    for number in range(MAX_RETURNING):
        recent.add(str(number), 100, 0.0)
    assert recent.lightest(0.0) == 100
