from workers.engine.journal.shipping import RETRY_S, Shipper
from workers.protocol.counts import MAX_RECORDS_IN_FRAME as BATCH
from workers.protocol.counts import EngineRecord, TokenUsage


def record(seq):
    return EngineRecord(seq, f"r{seq}", 0, "tenant", "root", TokenUsage())


def sent(shipper, links, now=0.0):
    batch = shipper.next(links, now)
    return None if batch is None else (batch[0], [r.seq for r in batch[1]])


def test_records_go_once_by_one_link_until_acknowledged():
    shipper = Shipper([record(3), record(5)])
    assert sent(shipper, []) is None
    assert sent(shipper, [1, 2]) == (1, [3, 5])
    assert sent(shipper, [1, 2]) is None
    shipper.add(record(9))
    assert sent(shipper, [1, 2]) is None
    assert shipper.ack(1, 5, 0.0) == 5
    assert len(shipper) == 1
    assert sent(shipper, [1, 2]) == (1, [9])
    assert shipper.ack(1, 9, 0.0) == 9
    assert len(shipper) == 0


def test_a_lost_link_sends_everything_unacknowledged_again_by_another():
    shipper = Shipper([record(1), record(2), record(3)])
    sent(shipper, [1, 2])
    shipper.ack(1, 1, 0.0)
    assert sent(shipper, [2]) == (2, [2, 3])


def test_a_silent_link_is_given_up_after_a_while():
    shipper = Shipper([record(1)])
    sent(shipper, [1, 2], now=0.0)
    assert sent(shipper, [1, 2], now=RETRY_S - 0.1) is None
    assert sent(shipper, [1, 2], now=RETRY_S) == (2, [1])
    assert sent(shipper, [1, 2], now=2 * RETRY_S) == (1, [1])


def test_what_a_gateway_drops_is_never_acknowledged_by_a_later_frame():
    """Its queue is bounded, and each frame may be the one that finds it full."""
    for dropped in range(1, 40):
        shipper, in_sql, kept, now = Shipper(), set(), [], 0.0
        for number in range(1, 60):
            shipper.add(record(number))
            now += 0.4
            if (batch := sent(shipper, [1, 2], now)) is None:
                continue
            link, seqs = batch
            if number % dropped:
                kept.append((link, seqs))
            if number % 7 == 0:  # answered in order, some of them late
                for link, seqs in kept:
                    in_sql |= set(seqs)
                    shipper.ack(link, seqs[-1], now)
                kept = []
        forgotten = set(range(1, 60)) - shipper._records.keys()
        assert forgotten <= in_sql, dropped
        while len(shipper):
            link, seqs = sent(shipper, [1, 2], now := now + RETRY_S)
            shipper.ack(link, seqs[-1], now)


def test_a_frame_is_full_and_the_rest_follows_its_answer():
    shipper = Shipper([record(number) for number in range(1, BATCH + 3)])
    assert sent(shipper, [1])[1] == list(range(1, BATCH + 1))
    assert shipper.ack(1, BATCH, 0.0) == BATCH
    assert sent(shipper, [1]) == (1, [BATCH + 1, BATCH + 2])


def test_an_answer_from_the_wrong_link_or_beyond_what_was_sent_forgets_nothing():
    shipper = Shipper([record(1), record(2)])
    sent(shipper, [1])
    assert shipper.ack(2, 2, 0.0) == 0
    assert shipper.ack(1, 7, 0.0) == 0
    assert len(shipper) == 2
