import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.protocol.journal import MAX_PAYLOAD_BYTES, Chain, Kind, parse_segment_name, scan, segment_name

PAYLOADS = [b"header", b"", b"x" * 300, b"last"]


def segment(payloads=PAYLOADS, chain=None):
    chain = chain or Chain()
    return [chain.encode(Kind.OPEN, payload) for payload in payloads]


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_records_come_back_as_written(payloads):
    found = scan(b"".join(segment(payloads)))
    assert [record.payload for record in found.records] == payloads
    assert [record.seq for record in found.records] == list(range(1, len(payloads) + 1))
    assert found.state == "clean"


def test_a_scan_continues_the_chain_where_it_ended():
    first = b"".join(segment())
    found = scan(first)
    more = found.chain().encode(Kind.SEAL, b"more")
    assert scan(first + more).records[-1].seq == found.next_seq
    assert scan(more, after=found).state == "clean"


def test_preallocated_zeros_are_a_clean_end():
    data = b"".join(segment())
    found = scan(data + bytes(1000))
    assert (found.state, found.num_valid_bytes) == ("clean", len(data))


def test_every_cut_inside_the_last_record_is_a_torn_tail_that_keeps_what_lies_before():
    records = segment()
    before = b"".join(records[:-1])
    for cut in range(1, len(records[-1])):
        found = scan(before + records[-1][:cut] + bytes(64))
        assert [record.payload for record in found.records] == PAYLOADS[:-1], cut
        assert found.num_valid_bytes == len(before)
        assert found.state in {"torn", "clean"}  # a few leading zero bytes look like empty space


def test_every_flipped_byte_before_the_tail_is_corruption():
    records = segment()
    data = b"".join(records)
    for at in range(len(data) - len(records[-1])):
        damaged = bytearray(data)
        damaged[at] ^= 0x5A
        assert scan(bytes(damaged)).state == "corrupt", at


def test_a_dropped_an_exchanged_and_a_repeated_record_are_corruption():
    one, two, three, four = segment()
    for data in (one + three + four, one + three + two + four, one + two + two + three):
        assert scan(data).state == "corrupt"


def test_a_segment_of_another_journal_does_not_continue_this_one():
    found = scan(b"".join(segment()))
    foreign = Chain(next_seq=found.next_seq).encode(Kind.OPEN, b"foreign")
    assert scan(foreign, after=found).state == "corrupt"


def test_an_empty_file_is_clean_and_starts_a_chain():
    found = scan(b"")
    assert (found.records, found.state, found.next_seq) == ([], "clean", 1)


def test_a_payload_above_the_bound_is_refused():
    with pytest.raises(ValueError, match="exceeds"):
        Chain().encode(Kind.OPEN, bytes(MAX_PAYLOAD_BYTES + 1))


def test_segment_names_sort_as_their_records_and_others_are_no_segments():
    names = [segment_name(seq) for seq in (1, 9, 10, 12345)]
    assert names == sorted(names)
    assert [parse_segment_name(name) for name in names] == [1, 9, 10, 12345]
    assert parse_segment_name("poisoned.journal") is None
    assert parse_segment_name("00000000000000000001") is None
