from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.queueing.fairness import OUTPUT_CHARGE, TenantOrder, VirtualCounters

LONGEST = 50


@given(
    st.lists(st.floats(0.25, 4), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(1, LONGEST), st.integers(0, LONGEST)), min_size=20, max_size=150),
)
@settings(max_examples=60, deadline=None)
def test_backlogged_tenants_stay_within_the_bound_of_virtual_token_counters(weights, jobs):
    """Each job is served whole by the tenant that is named first; no tenant runs ahead by more than one largest job."""
    counters = VirtualCounters()
    order = TenantOrder(counters)
    tenants = {f"t{i}": weight for i, weight in enumerate(weights)}
    for tenant, weight in tenants.items():
        counters.enter(tenant, weight)
        order.add(tenant)
    bound = max((LONGEST + OUTPUT_CHARGE * LONGEST) / w for w in weights)
    for prompt, output in jobs:
        with closing(order.smallest_first()) as names:
            tenant = next(names)
        counters.charge(tenant, computed=prompt, output=output)
        levels = [counters[tenant] for tenant in tenants]
        assert max(levels) - min(levels) <= bound + 1e-6


@given(
    st.floats(0, 300),
    st.lists(st.tuples(st.integers(1, LONGEST), st.integers(0, 3), st.booleans()), min_size=20, max_size=200),
)
@settings(max_examples=100, deadline=None)
def test_with_tenants_that_come_and_go_nobody_is_ahead_by_more_than_a_credit_and_a_job(credit, actions):
    counters = VirtualCounters(credit)
    active = {"t0", "t1"}
    for tenant in sorted(active):
        counters.enter(tenant, 1.0)
    for tokens, number, moves in actions:
        tenant = f"t{number}"
        if moves and number > 1:  # the first two always have more to do
            if tenant in active:
                counters.leave(tenant)
            else:
                counters.enter(tenant, 1.0)
            active ^= {tenant}
        counters.charge(min(sorted(active), key=lambda t: counters[t]), computed=tokens)
        levels = [counters[t] for t in active]
        assert max(levels) - min(levels) <= credit + LONGEST + 1e-6


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["add", "discard", "charge"])), max_size=200))
def test_the_order_names_each_tenant_once_from_the_smallest_counter_up(actions):
    """Against a plain model: a set and a sort."""
    counters = VirtualCounters()
    order, present = TenantOrder(counters), set()
    for tenant in "abcd":
        counters.enter(tenant, 1.0)
    for number, (tenant, action) in enumerate(actions):
        if action == "charge":
            counters.charge(tenant, computed=number % 7)
        elif action == "add" and tenant not in present:
            order.add(tenant)
            present.add(tenant)
        elif action == "discard" and tenant in present:
            order.discard(tenant)
            present.remove(tenant)
        with closing(order.smallest_first()) as tenants:
            found = list(tenants)
        assert sorted(found) == sorted(present)
        levels = [counters[t] for t in found]
        assert levels == sorted(levels)
