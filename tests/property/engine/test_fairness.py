from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.fairness import OUTPUT_CHARGE, FairQueue, VirtualCounters

LONGEST = 50


@given(
    st.lists(st.floats(0.25, 4), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.integers(1, LONGEST), st.integers(0, LONGEST)), min_size=20, max_size=150
    ),
)
@settings(max_examples=60, deadline=None)
def test_backlogged_tenants_stay_within_the_bound_of_virtual_token_counters(weights, jobs):
    """Each job is served whole by the tenant that the queue names; no tenant runs ahead by more than one largest job."""
    counters = VirtualCounters()
    queue = FairQueue(counters)
    tenants = {f"t{i}": weight for i, weight in enumerate(weights)}
    for tenant, weight in tenants.items():
        counters.enter(tenant, weight)
        for number in range(len(jobs)):
            queue.push(tenant, (tenant, number))
    bound = max((LONGEST + OUTPUT_CHARGE * LONGEST) / w for w in weights)
    for prompt, output in jobs:
        item = queue.peek()
        queue.remove(item[0], item)
        counters.charge(item[0], computed=prompt, output=output)
        levels = [counters[tenant] for tenant in tenants]
        assert max(levels) - min(levels) <= bound + 1e-6


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["push", "pop", "charge"])), max_size=200
    )
)
def test_the_queue_names_the_smallest_counter_and_keeps_order_inside_a_tenant(actions):
    """Against a plain model: lists per tenant and a linear search."""
    counters = VirtualCounters()
    queue, model = FairQueue(counters), {}
    for tenant in "abcd":
        counters.enter(tenant, 1.0)
    for number, (tenant, action) in enumerate(actions):
        if action == "push":
            queue.push(tenant, number)
            model.setdefault(tenant, []).append(number)
        elif action == "charge":
            counters.charge(tenant, computed=number % 7)
        elif model:
            found = queue.peek()
            owner = next(t for t, items in model.items() if items[0] == found)
            assert counters[owner] == min(counters[t] for t in model)
            queue.remove(owner, found)
            model[owner].pop(0)
            if not model[owner]:
                del model[owner]
        assert len(queue) == sum(map(len, model.values()))
    assert (queue.peek() is None) == (not model)
