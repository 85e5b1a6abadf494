"""Deficit round robin over tenants, simulated."""

from __future__ import annotations

from collections import Counter

import msgspec

from accounting.batches.claims import Waiting
from workers.jobs.batches.fairness import QUANTUM_TOKENS, choose, cost


def waiting(name: str, cost: int = 1000, weight: int = 100, **fields) -> Waiting:
    values = {"deficit_tokens": 0, "last_visit": 0, "num_claimed": 0} | fields
    return Waiting(tenant_id=name, weight_percent=weight, predicted_tokens=cost, **values)


def simulate(tenants: list[Waiting], turns: int) -> Counter[str]:
    """Tokens given to each."""
    state = {t.tenant_id: t for t in tenants}
    given: Counter[str] = Counter()
    for _ in range(turns):
        turn = choose(list(state.values()), 8)
        given[turn.tenant_id] += state[turn.tenant_id].predicted_tokens
        for name, deficit in turn.deficits.items():
            visit = turn.visits[name]
            state[name] = msgspec.structs.replace(state[name], deficit_tokens=deficit, last_visit=visit)
    return given


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def test_nobody_waits_means_nobody_is_chosen():
    assert choose([], 8) is None
    assert choose([waiting("a", num_claimed=8)], 8) is None


def test_tenants_share_tokens_not_turns():
    given = simulate([waiting("big", 64_000), waiting("small", 1_000)], 3000)
    assert jain([given["big"], given["small"]]) > 0.99


def test_weights_are_shares():
    given = simulate([waiting("double", 5_000, 200), waiting("single", 5_000, 100)], 3000)
    assert 1.9 < given["double"] / given["single"] < 2.1


def test_one_huge_queue_against_fifty_small_tenants_is_fair():
    tenants = [waiting("whale", 60_000)] + [waiting(f"t{i}", 500 + 100 * i) for i in range(50)]
    given = simulate(tenants, 20_000)
    assert jain([given[t.tenant_id] for t in tenants]) >= 0.95


def test_a_chunk_far_beyond_the_quantum_needs_no_rounds_to_be_walked():
    turn = choose([waiting("a", 10**12)], 8)
    assert turn.tenant_id == "a"
    assert 0 <= turn.deficits["a"] < QUANTUM_TOKENS


def test_who_has_all_its_chunks_claimed_neither_gets_nor_saves_up():
    turn = choose([waiting("full", num_claimed=8, deficit_tokens=7), waiting("b")], 8)
    assert turn.tenant_id == "b"
    assert turn.deficits["full"] == 7


def test_a_debt_from_a_wrong_prediction_is_paid_back():
    given = simulate([waiting("a", deficit_tokens=-400_000), waiting("b")], 500)
    assert 350_000 < given["b"] - given["a"] < 450_000


def test_cached_tokens_cost_a_tenth():
    assert cost(1000, 50) == 150
