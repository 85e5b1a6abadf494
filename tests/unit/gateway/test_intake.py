"""S3: bytes of bodies, held at one time and per minute, by tenant. Time is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from accounting.values.types import Principal
from gateway.base.errors import ApiError
from gateway.intake.intake import MAX_REMEMBERED, Intake, Share

MIB = 2**20


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def intake(clock: Clock) -> Intake:
    return Intake(most_held=64 * MIB, per_minute=60 * MIB, clock=clock)


def principal(tenant: str, kind: Any = "tenant") -> Principal:
    return Principal(kind=kind, tenant_id=tenant, key_id=f"key_{tenant}", scopes=frozenset())


@contextlib.contextmanager
def share_of(intake: Intake, principal: Principal | None) -> Iterator[Share]:
    share = Share(intake, principal)
    with share.held():
        yield share


def refused(intake: Intake, tenant: str, num_bytes: int) -> ApiError:
    with pytest.raises(ApiError) as refusal, share_of(intake, principal(tenant)) as share:
        share.take_up_to(num_bytes)
    return refusal.value


def test_s3_one_tenant_holds_no_more_than_it_leaves_and_others_find_room(intake: Intake) -> None:
    with share_of(intake, principal("flood")) as flood:
        flood.take_up_to(32 * MIB)
        error = refused(intake, "flood", 1)
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        assert error.headgate is not None
        assert error.headgate["dimension"] == "body_bytes_held"
        assert int(error.headers["retry-after"]) >= 1
        with share_of(intake, principal("victim")) as victim:
            victim.take_up_to(16 * MIB)
            assert intake.num_held == 48 * MIB
    assert intake.num_held == 0
    with share_of(intake, principal("flood")) as again:
        again.take_up_to(28 * MIB)


def test_s3_bytes_of_a_minute_are_bounded_by_tenant_and_come_back_evenly(intake: Intake, clock: Clock) -> None:
    for _ in range(3):
        with share_of(intake, principal("flood")) as share:
            share.take_up_to(20 * MIB)
    error = refused(intake, "flood", 2 * MIB)
    assert (error.status, error.headgate and error.headgate["dimension"]) == (429, "body_bytes_per_minute")
    assert error.headers["retry-after"] == "3"  # rounded up from 2.001 s
    with share_of(intake, principal("victim")) as share:
        share.take_up_to(20 * MIB)
    clock.now += int(error.headers["retry-after-ms"]) / 1000
    with share_of(intake, principal("flood")) as share:
        share.take_up_to(2 * MIB)
    assert intake.refusals == {"body_bytes_per_minute": 1}
    assert intake.num_held == 0


def test_what_a_body_takes_bit_by_bit_is_counted_once(intake: Intake) -> None:
    with share_of(intake, principal("a")) as share:
        for num_bytes in (0, 10, 10, 5, 30):
            share.take_up_to(num_bytes)
        assert (intake.num_held, intake.num_taken) == (30, 30)


def test_bytes_are_held_until_the_last_holder_has_ended(intake: Intake) -> None:
    with share_of(intake, principal("a")) as share:
        share.take_up_to(10)
        outlives = share.held()
        outlives.__enter__()
    assert intake.num_held == 10
    share.take_up_to(30)
    assert intake.num_held == 30
    outlives.__exit__(None, None, None)
    assert intake.num_held == 0
    with share.held():  # work of which nothing ran before its request had ended
        share.take_up_to(20)
    assert intake.num_held == 0


def test_batch_lines_count_as_held_and_towards_no_minute(intake: Intake) -> None:
    for _ in range(10):
        with share_of(intake, principal("a", "batch")) as share:
            share.take_up_to(20 * MIB)
    with share_of(intake, None) as share:
        share.take_up_to(10**12)
    with share_of(intake, principal("a", "batch")) as share, pytest.raises(ApiError):
        share.take_up_to(40 * MIB)


def test_tenants_whose_minute_is_whole_again_are_forgotten(intake: Intake, clock: Clock) -> None:
    for i in range(2 * MAX_REMEMBERED + 1):
        clock.now += 1
        with share_of(intake, principal(f"t{i}")) as share:
            share.take_up_to(1)
    assert len(intake._allowances) <= MAX_REMEMBERED
    assert len(intake._held) == 0
