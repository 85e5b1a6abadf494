"""Databases of the run's own Redis, emptied: what an earlier test left there, such as a verdict on other books, a worker
that has gone or a message for other jobs, is not the next test's."""

from __future__ import annotations

from pathlib import Path

import redis

BROKER_DB = 1


def emptied(redis_socket: Path, number: int) -> str:
    """Returns the URL of a database from which everything has been deleted."""
    with redis.Redis(unix_socket_path=str(redis_socket), db=number) as client:
        client.flushdb()
    return f"unix://{redis_socket}?db={number}"


def emptied_broker(redis_socket: Path) -> str:
    """Returns Celery's URL of the database for messages, from which everything has been deleted."""
    emptied(redis_socket, BROKER_DB)
    return f"redis+socket://{redis_socket}?virtual_host={BROKER_DB}"
