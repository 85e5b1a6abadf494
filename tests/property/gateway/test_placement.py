"""Whatever is known of workers, the choice is one of them, within the bound, and for the reason given."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cache.tree.hashing import group_hashes
from gateway.routing.placement import LOAD_BOUND, Candidate, Wanted, _Rates, place

rates = st.one_of(st.just(0.0), st.floats(1.0, 1e5))


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    return [
        Candidate(
            f"worker-{n}",
            num_cached=64 * draw(st.integers(0, 20)),
            num_queued=draw(st.integers(0, 50_000)),
            num_sequences=draw(st.integers(0, 300)),
            max_running=draw(st.integers(0, 64)),
            prefill_rate=draw(rates),
            decode_rate=draw(rates),
        )
        for n in range(draw(st.integers(1, 6)))
    ]


wants = st.builds(
    Wanted,
    num_prompt=st.integers(1, 2000),
    num_public=st.sampled_from([0, 64, 640]),
    anchor=st.sampled_from([b"", b"a" * 16, b"b" * 16]),
    num_output=st.floats(1.0, 1000.0),
)


@given(candidates(), wants, st.integers(0, 100))
@example([Candidate("worker-0", num_sequences=10**6)], Wanted(1), 0)
def test_the_choice_is_a_candidate_within_the_bound(found: list[Candidate], wanted: Wanted, turn: int) -> None:
    placement = place(found, wanted, turn)
    chosen = next(c for c in found if c.worker == placement.worker)
    known = _Rates(found)
    work = {c.worker: known.work_s(c, wanted.num_output) for c in found}
    mean = (sum(work.values()) + known.request_s(wanted)) / len(found)
    assert work[chosen.worker] <= LOAD_BOUND * mean or len(found) == 1
    assert placement.num_cached == chosen.num_cached
    assert placement.num_elsewhere == max((c.num_cached for c in found if c is not chosen), default=0)
    assert placement.ttft_s >= 0


@given(candidates(), wants, st.integers(0, 100), st.randoms())
def test_the_order_in_which_workers_are_found_does_not_matter(
    found: list[Candidate], wanted: Wanted, turn: int, chance: object
) -> None:
    shuffled = list(found)
    chance.shuffle(shuffled)
    one, other = place(found, wanted, turn), place(shuffled, wanted, turn)
    # Sums of floats differ in their last bits with the order; a worker right on the bound may fall to either side.
    if one.worker != other.worker:
        known = _Rates(found)
        work = {c.worker: known.work_s(c, wanted.num_output) for c in found}
        bound = LOAD_BOUND * (sum(work.values()) + known.request_s(wanted)) / len(found)
        near = [w for w, s in work.items() if abs(s - bound) <= 1e-6 * bound]
        same_cost = abs(one.ttft_s - other.ttft_s) <= 1e-6 * max(one.ttft_s, 1e-9)
        assert near or same_cost


@given(candidates(), wants)
def test_the_reason_is_the_one_that_holds(found: list[Candidate], wanted: Wanted) -> None:
    placement = place(found, wanted)
    most = max(c.num_cached for c in found)
    match placement.reason:
        case "only":
            assert len(found) == 1
        case "affinity":
            assert placement.num_cached == most > wanted.num_public
        case "bound" | "load":
            assert placement.num_cached < most or most <= wanted.num_public
        case "cold":
            assert wanted.anchor
            assert most <= wanted.num_public


@given(st.integers(1, 8), st.integers(0, 7), wants)
def test_without_load_who_has_a_tenants_own_part_gets_it(number: int, holder: int, wanted: Wanted) -> None:
    holder %= number
    found = [Candidate(f"w{n}", num_cached=wanted.num_public * (n != holder)) for n in range(number)]
    found[holder] = Candidate(f"w{holder}", num_cached=wanted.num_public + 64)
    if wanted.num_prompt >= wanted.num_public + 64:
        assert place(found, wanted).worker == f"w{holder}"


@given(
    st.lists(st.integers(0, 1000), min_size=64, max_size=300),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
)
def test_two_namespaces_have_no_group_in_common(tokens: list[int], mine: bytes, theirs: bytes) -> None:
    """Behind a public part too: what is shared is the public part alone."""
    public = b"p" * 16
    if len({mine, theirs, public}) < 3:
        return
    one, other = (
        {group for group, _ in group_hashes(b"k" * 32, b"root", [(public, 32), (region, -1)], tokens, block_size=16)}
        for region in (mine, theirs)
    )
    assert len(one & other) == 1  # the public part
