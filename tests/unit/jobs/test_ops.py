"""The jobs process's own metrics, over HTTP."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from workers.jobs.base import ops


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_metrics_are_served_while_it_listens_and_no_longer():
    registry, address = CollectorRegistry(), f"127.0.0.1:{free_port()}"
    Counter("headgate_something", "x", registry=registry).inc()
    with ops.listening(address, None, registry), urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert b"headgate_something_total 1.0" in answer.read()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics")


def test_without_an_address_nobody_listens():
    with ops.listening("", None, CollectorRegistry()):
        pass


def test_a_socket_that_listens_already_is_served_and_outlives_it():
    with socket.socket() as given:
        given.bind(("127.0.0.1", 0))
        given.listen()
        given.setblocking(False)
        url = f"http://127.0.0.1:{given.getsockname()[1]}/metrics"
        with ops.listening("", given.fileno(), CollectorRegistry()), urllib.request.urlopen(url) as answer:
            assert answer.status == 200
        with socket.create_connection(given.getsockname()):
            pass
