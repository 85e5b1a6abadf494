"""Billed + written off = counted by the engine, for any attempts in any order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from money import legs

from accounting.ledger.legs import COUNTED
from accounting.requests import write_offs
from accounting.values.types import TOKEN_CLASSES

counts = st.integers(0, 50)


@st.composite
def requests(draw):
    """(records, ending that bills at most their sum, arrival order with None for the ending)."""
    records = [
        {"request_id": "r", "attempt": n, **{name: draw(counts) for name in COUNTED}}
        for n in range(draw(st.integers(0, 4)))
    ]
    billed = {name: draw(st.integers(0, sum(r[name] for r in records))) for name in TOKEN_CLASSES}
    ending = {
        "request_id": "r",
        "kind": "settle",
        "attempt": 0,
        "write_off": "resume",
        "currency": "USD",
        "charge": sum(billed.values()),
        "reserved": 99,
        **billed,
        "speculated": 0,
        "recomputed": 0,
        **{f"charge_{name}": billed[name] for name in TOKEN_CLASSES},
    }
    return records, ending, draw(st.permutations([None, *range(len(records))]))


def arrive(records, ending, order):
    """What request_postings.py does: a write-off is made when an ending and a record have met."""
    present, made, ended = [], [], False
    for step in order:
        if step is None:
            ended, new = True, {(r["request_id"], r["attempt"]) for r in present}
        else:
            present.append(records[step])
            new = {("r", records[step]["attempt"])}
        if ended:
            made += write_offs.rows(ending, present, made, new, 0)
    return made


@given(requests())
def test_billed_and_written_off_add_up_to_the_engines_count(request):
    records, ending, order = request
    made = arrive(records, ending, order)
    for name in COUNTED:
        written_off = sum(row[name] for row in made)
        assert ending[name] + written_off == sum(record[name] for record in records)


@given(requests())
def test_a_write_off_costs_nothing_is_never_negative_and_has_its_own_key(request):
    made = arrive(*request)
    assert len({(row["kind"], row["attempt"]) for row in made}) == len(made)
    for row in made:
        assert row["charge"] == row["reserved"] == 0
        assert all(row[name] >= 0 for name in COUNTED)
        assert any(row[name] for name in COUNTED)


@given(requests())
def test_legs_balance_per_unit(request):
    records, ending, order = request
    for entry in (ending, *arrive(records, ending, order)):
        units: dict[str, int] = {}
        for leg in legs(entry):
            units[leg["unit"]] = units.get(leg["unit"], 0) + leg["amount"]
        assert not any(units.values())
