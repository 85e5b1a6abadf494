"""Counts that several processes share."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from prometheus_client import CollectorRegistry

from workers.jobs.base.tally import NAMES, Tally
from workers.jobs.batches.batch_metrics import BatchMetrics

NUM_PROCESSES, NUM_EACH = 4, 250


def add_many(path: Path) -> None:
    tally = Tally(path)
    for _ in range(NUM_EACH):
        tally.add("busy")


def test_no_count_of_processes_at_once_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "jobs.counts"
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=add_many, args=(path,)) for _ in range(NUM_PROCESSES)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert Tally(path).read() == {**dict.fromkeys(NAMES, 0), "busy": NUM_PROCESSES * NUM_EACH}


def test_without_a_file_nothing_is_counted(tmp_path: Path) -> None:
    Tally(None).add("failed")
    assert set(Tally(None).read().values()) == {0}
    assert set(Tally(tmp_path / "none").read().values()) == {0}


def test_the_page_shows_what_children_counted_and_how_long_they_were_silent(tmp_path: Path) -> None:
    tally, pulse = Tally(tmp_path / "counts"), tmp_path / "pulse"
    tally.add("failed")
    tally.add("fence_reject")
    tally.add("quarantined")
    metrics, registry = BatchMetrics(tally, pulse), CollectorRegistry()
    registry.register(metrics)
    assert registry.get_sample_value("headgate_jobs_last_consume_age_seconds") == 0  # it is starting
    pulse.touch()
    metrics.num_expired = 3
    assert registry.get_sample_value("headgate_batch_line_retries_total", {"class": "failed"}) == 1
    assert registry.get_sample_value("headgate_batch_line_retries_total", {"class": "busy"}) == 0
    assert registry.get_sample_value("headgate_batch_fence_rejects_total") == 1
    assert registry.get_sample_value("headgate_batch_lines_quarantined_total") == 1
    assert registry.get_sample_value("headgate_batch_claims_expired_total") == 3
    age = registry.get_sample_value("headgate_jobs_last_consume_age_seconds")
    assert age is not None and 0 <= age < 60
