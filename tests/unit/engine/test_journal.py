import os

import pytest
from engine_driver import LINK, Driver
from fakes import ROOT, ScriptedRunner, encode, generate_request

from workers.engine.engine import LinkClosed
from workers.engine.journal import journal as journal_module
from workers.engine.journal.journal import EngineJournal
from workers.engine.values.errors import CannotStartYet, StartError
from workers.protocol.counts import EngineAck
from workers.protocol.engine_journal import CRASH_REASON
from workers.protocol.journal import Kind, scan, segment_name
from workers.protocol.messages import Cancel
from workers.protocol.segments import list_segments

PROMPT = encode("a prompt that fills a few blocks")


def open_journal(directory):
    return EngineJournal(directory, "worker-0", "process", ROOT, ballast_bytes=4096)


def drop(journal):
    """As SIGKILL: descriptors close, nothing is flushed."""
    os.close(journal._log.file)
    os.close(journal._log.lock)


def driver(journal):
    return Driver(ScriptedRunner(num_blocks=64, block_size=4), journal=journal, max_batch_tokens=64)


def rebuilt(directory):
    journal = open_journal(directory)
    journal.close()
    return journal.unacked


def test_a_worker_killed_after_any_step_leaves_exact_records(tmp_path):
    for at in range(1, 30):
        directory = tmp_path / str(at)
        journal = open_journal(directory)
        drive = driver(journal)
        drive.send(*[generate_request(f"r{i}", PROMPT[i:], 4 + 5 * i, num_choices=i or 1) for i in range(4)])
        for step in range(at):
            if step == 5:
                drive.send(Cancel("r3", 1), Cancel("r2"))
            drive.step()
        expected = {a.message.request_id: a.usage for a in drive.engine.attempts.values()}
        running = set(expected)
        expected |= {rid: ending.usage for (_, rid), ending in drive.endings.items()}
        drop(journal)
        records = rebuilt(directory)
        assert {record.request_id: record.usage for record in records} == expected
        assert {r.request_id for r in records if r.reason == CRASH_REASON} == running
        assert len({record.seq for record in records}) == len(records)
        if not running:
            return
    pytest.fail("the requests never ended")


def test_records_are_kept_until_acknowledged_over_restarts_and_numbers_go_on(tmp_path):
    first = driver(open_journal(tmp_path))
    first.send(*[generate_request(f"a{i}", PROMPT, 3) for i in range(3)])
    first.run()
    seqs = [record.seq for record in first.engine._journal.unacked]
    first.send(EngineAck("worker-0", seqs[0]))
    first.step()
    first.engine._journal.close()
    journal = open_journal(tmp_path)
    assert [record.seq for record in journal.unacked] == seqs[1:]
    second = driver(journal)
    second.send(generate_request("b", PROMPT, 3))
    second.run()
    assert journal.unacked[-1].seq > seqs[-1]
    second.send(EngineAck("worker-0", journal.unacked[-1].seq))
    second.step()
    journal.close()
    assert rebuilt(tmp_path) == []


def test_a_lost_link_leaves_a_record_of_what_was_computed(tmp_path):
    drive = driver(open_journal(tmp_path))
    drive.send(generate_request("r", PROMPT, 30))
    for _ in range(5):
        drive.step()
    drive.send(LinkClosed())
    (record,) = drive.step().records
    assert (record.reason, record.usage.output, record.usage.prompt) == ("link_lost", 5, len(PROMPT))
    drive.check_idle()
    drive.engine._journal.close()


def test_counts_lie_in_the_file_before_the_step_gives_its_frame_away(tmp_path):
    journal = open_journal(tmp_path)
    drive = driver(journal)
    drive.send(generate_request("r", PROMPT, 5))
    drive.step()
    (segment,) = tmp_path.glob("*.journal")
    kinds = [record.kind for record in scan(segment.read_bytes()).records]
    assert kinds[-2:] == [Kind.BEGUN, Kind.COUNTS]
    journal.close()


def test_a_second_process_in_a_slot_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "TAKEN_S", 0.2)
    journal = open_journal(tmp_path)
    with pytest.raises(StartError, match="Another process"):
        open_journal(tmp_path)
    journal.close()
    open_journal(tmp_path).close()


def test_rotation_carries_everything_open_into_the_new_segment(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 700)
    monkeypatch.setattr(journal_module, "KEPT_SEGMENTS", 3)
    journal = open_journal(tmp_path)
    drive = driver(journal)
    drive.send(generate_request("done", PROMPT, 2), generate_request("open", PROMPT, 60))
    for _ in range(40):
        drive.step()
    usage = drive.attempt("open").usage
    assert len(list(tmp_path.glob("*.journal"))) == 3
    drop(journal)
    records = {record.request_id: record for record in rebuilt(tmp_path)}
    assert records["open"].usage == usage
    assert records["done"].usage == drive.endings[LINK, "done"].usage


def test_a_segment_whose_checkpoint_is_large_takes_as_much_again_before_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 700)
    journal = open_journal(tmp_path)
    drive = driver(journal)
    for number in range(40):
        drive.send(generate_request(f"r{number}", PROMPT, 1))
        drive.run()
    journal._rotate()
    begun, rotate = [], journal._rotate
    monkeypatch.setattr(journal, "_rotate", lambda: begun.append(rotate()))
    assert journal._log.num_bytes > 700
    for seq in range(20):
        journal.ack(journal.unacked[seq % 2].seq)
        journal.flush()
    assert not begun, "each tiny flush wrote all again that nobody had acknowledged"


def test_a_torn_last_write_counts_as_not_written(tmp_path):
    journal = open_journal(tmp_path)
    drive = driver(journal)
    drive.send(generate_request("r", PROMPT, 30))
    for _ in range(4):
        drive.step()
    usage = drive.attempt("r").usage
    (segment,) = tmp_path.glob("*.journal")
    size = segment.stat().st_size
    drive.step()
    drop(journal)
    os.truncate(segment, segment.stat().st_size - 3)
    assert segment.stat().st_size > size
    (record,) = rebuilt(tmp_path)
    assert record.usage == usage


def test_a_segment_torn_before_its_checkpoint_ended_falls_back_to_the_one_before(tmp_path):
    journal = open_journal(tmp_path)
    drive = driver(journal)
    drive.send(generate_request("r", PROMPT, 30))
    for _ in range(4):
        drive.step()
    usage = drive.attempt("r").usage
    journal._rotate()
    drop(journal)
    newest = max(tmp_path.glob("*.journal"))
    os.truncate(newest, newest.stat().st_size - 10)
    (record,) = rebuilt(tmp_path)
    assert record.usage == usage


@pytest.mark.parametrize("torn", [b"", b"\0" * 4096, b"\x00\x00\x01"], ids=["empty", "zeros", "torn"])
def test_a_segment_that_was_begun_and_never_written_is_begun_again(tmp_path, torn):
    """Killed between a segment's creation and its first whole record."""
    drive = driver(open_journal(tmp_path))
    drive.send(*[generate_request(f"a{i}", PROMPT, 3) for i in range(3)])
    drive.run()
    drop(drive.engine._journal)
    before = [record.seq for record in rebuilt(tmp_path)]
    following = max(scan(segment.path.read_bytes()).next_seq for segment in list_segments(tmp_path))
    (tmp_path / segment_name(following)).write_bytes(torn)
    assert [record.seq for record in rebuilt(tmp_path)] == before


def test_a_damaged_segment_is_set_aside_and_numbers_are_never_used_twice(tmp_path, caplog):
    journal = open_journal(tmp_path)
    drive = driver(journal)
    drive.send(generate_request("done", PROMPT, 2))
    drive.run()
    (ended,) = journal.unacked
    (segment,) = tmp_path.glob("*.journal")
    undamaged = segment.stat().st_size
    drive.send(generate_request("open", PROMPT, 30))
    for _ in range(6):
        drive.step()
    last_seq = journal._log.chain.next_seq
    drop(journal)
    data = bytearray(segment.read_bytes())
    data[undamaged + 40] ^= 0xFF
    segment.write_bytes(data)
    reopened = open_journal(tmp_path)
    assert reopened.unacked == [ended]
    assert reopened._log.chain.next_seq > last_seq
    assert [p.suffix for p in tmp_path.glob("*.quarantined")] == [".quarantined"]
    assert "set aside" in caplog.text
    reopened.close()
    assert [r.request_id for r in rebuilt(tmp_path)] == ["done"]


def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotStartYet, match="cannot be used"):
        open_journal(tmp_path / "file" / "journal")
