"""A real OTLP/HTTP receiver."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from otlp import Collector


@pytest.fixture(autouse=True)
def nobody_exports_afterwards() -> Iterator[None]:
    """What is retried behind a test draws its jitter from the `random` that Hypothesis watches in later ones."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("Otel") or "(shutdown)" in thread.name:
            thread.join(20)


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
