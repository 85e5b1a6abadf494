"""What an operator declares is read again when the auth epoch has risen, and not while nobody changes anything."""

from __future__ import annotations

import pytest

from gateway.http.auth_epoch import AuthEpoch


class Read:
    def __init__(self) -> None:
        self.num = 0
        self.fails = False

    async def __call__(self) -> None:
        self.num += 1
        if self.fails:
            raise OSError("SQL does not answer")


async def test_it_is_read_once_for_each_epoch():
    epoch, read = AuthEpoch(), Read()
    look = epoch.reading(read)
    for number, num_readings in ((7, 1), (7, 1), (8, 2), (8, 2)):
        epoch.number = number
        await look()
        assert read.num == num_readings


async def test_until_the_epoch_is_known_it_is_read_each_time():
    epoch, read = AuthEpoch(), Read()
    look = epoch.reading(read)
    await look()
    await look()
    assert read.num == 2


async def test_a_reading_that_fails_is_made_again():
    epoch, read = AuthEpoch(), Read()
    look, epoch.number, read.fails = epoch.reading(read), 7, True
    with pytest.raises(OSError, match="does not answer"):
        await look()
    read.fails = False
    await look()
    await look()
    assert read.num == 2


async def test_a_change_while_it_is_read_is_read_as_well():
    epoch, read = AuthEpoch(), Read()
    epoch.number = 7

    async def read_while_it_rises() -> None:
        await read()
        epoch.number = 8

    look = epoch.reading(read_while_it_rises)
    await look()
    await look()
    assert read.num == 2


async def test_two_followers_read_each_for_itself():
    epoch, first, second = AuthEpoch(), Read(), Read()
    epoch.number = 7
    looks = [epoch.reading(first), epoch.reading(second)]
    for look in (*looks, *looks):
        await look()
    assert (first.num, second.num) == (1, 1)
