"""F09 and F41 at the wall: addresses judged as they are connected to, answers that never end, names that move."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
from load import stretched
from webhook_receiver import DRIP, ENDLESS_1XX, ENDLESS_BODY, ENDLESS_HEADERS, SILENT, Receiver, hostile, receiving

from accounting.events.egress import Egress, networks
from accounting.values.errors import InvalidError
from workers.jobs.webhooks.egress import Poster

LOOPBACK = Egress(networks("127.0.0.0/8"))
LIMIT_S = 0.5


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def answers(*addresses: str):
    """A name server that says these, and how often it was asked."""
    asked: list[str] = []

    def lookup(host, port, *_):
        asked.append(host)
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses
        ]

    return lookup, asked


async def test_a_name_that_leads_home_is_refused_at_the_connect(threads):
    async with receiving(Receiver()) as receiver:
        port = int(receiver.url.rpartition(":")[2].partition("/")[0])
        for address in ("127.0.0.1", "::ffff:127.0.0.1", "169.254.169.254", "::1", "10.0.0.1"):
            lookup, asked = answers(address)
            poster = Poster(Egress(), threads, LIMIT_S, lookup)
            with pytest.raises(aiohttp.ClientConnectorError) as refusal:
                await poster.post(f"https://hook.example.com:{port}/", b"{}", {})
            assert "not spoken to" in str(refusal.value.os_error)
            assert asked == ["hook.example.com"], "judged by the one lookup that the connect uses"
        assert receiver.came == []


async def test_the_same_name_is_reached_once_its_network_is_allowed(threads):
    """The control of the test above: nothing but the judgement kept it out."""
    lookup, asked = answers("127.0.0.1")
    async with receiving(Receiver()) as receiver:
        url = receiver.url.replace("127.0.0.1", "hook.example.com")
        assert await Poster(LOOPBACK, threads, 5, lookup).post(url, b"{}", {}) == 204
        assert (len(receiver.came), len(asked)) == (1, 1)


async def test_dns_rebinding_public_at_first_and_home_afterwards(threads):
    """Whatever a name says the second time is never connected to: each try has one lookup and judges what it got."""
    turns = iter([["203.0.113.7"], ["127.0.0.1"], ["203.0.113.7", "127.0.0.1"]])

    def lookup(host, port, *_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in next(turns)]

    connected = []

    async def home(_reader, writer):
        connected.append(writer.get_extra_info("peername"))
        writer.close()

    async with await asyncio.start_server(home, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        poster = Poster(Egress(), threads, 0.3, lookup)
        for _ in range(3):
            with pytest.raises((aiohttp.ClientError, TimeoutError)):
                await poster.post(f"https://rebind.example.com:{port}/", b"{}", {})
        assert connected == [], "not even a connection was made"
    with pytest.raises(StopIteration):
        next(turns)


@pytest.mark.parametrize("host", ["2130706433", "0177.0.0.1", "0x7f.1", "127.1", "localhost."])
async def test_numbers_in_disguise_never_get_as_far_as_a_lookup(threads, host):
    lookup, asked = answers("127.0.0.1")
    with pytest.raises(InvalidError):
        await Poster(LOOPBACK, threads, LIMIT_S, lookup).post(f"https://{host}:8443/", b"{}", {})
    assert asked == []


async def test_a_redirect_is_an_answer_and_not_a_way(threads):
    async with receiving(Receiver(statuses=[302, 307, 308])) as receiver:
        poster = Poster(LOOPBACK, threads, 5)
        statuses = [await poster.post(receiver.url, b"{}", {}) for _ in range(3)]
        assert (statuses, dict(receiver.paths)) == ([302, 307, 308], {"/hook": 3})


@pytest.mark.parametrize("kind", [SILENT, DRIP, ENDLESS_HEADERS, ENDLESS_1XX])
async def test_what_never_answers_costs_one_limit_of_time(threads, kind):
    async with hostile(kind) as receiver:
        started = time.monotonic()
        with pytest.raises((TimeoutError, aiohttp.ClientError)):
            await Poster(LOOPBACK, threads, LIMIT_S).post(receiver.url, b"{}", {})
        assert time.monotonic() - started < stretched(LIMIT_S + 1)
        assert receiver.num_asked == 1


async def test_an_endless_answer_is_left_after_its_status(threads):
    async with hostile(ENDLESS_BODY) as receiver:
        started = time.monotonic()
        assert await Poster(LOOPBACK, threads, 5).post(receiver.url, b"{}", {}) == 200
        assert time.monotonic() - started < stretched(2)
        await asyncio.sleep(0.2)
        sent = receiver.num_sent
        await asyncio.sleep(0.3)
        assert receiver.num_sent == sent, "the connection is closed"


async def test_a_name_server_that_never_answers_holds_its_askers_place(threads):
    """The POST ends for its caller when the thread is free again, so threads cannot pile up behind one tenant."""
    release = threading.Event()

    def lookup(*_):
        release.wait(10)
        return []

    poster = Poster(LOOPBACK, threads, 0.1, lookup)
    asking = asyncio.create_task(poster.post("https://slow.example.com/", b"{}", {}))
    await asyncio.sleep(0.5)
    assert not asking.done()
    release.set()
    with pytest.raises(TimeoutError):
        await asking


async def test_an_error_of_a_lookup_that_comes_after_the_limit_is_taken_note_of(threads):
    """asyncio writes a traceback for each error of a future that nobody asks."""
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))

    def lookup(*_):
        time.sleep(0.3)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(TimeoutError):
        await Poster(LOOPBACK, threads, 0.05, lookup).post("https://slow.example.com/", b"{}", {})
    threads.shutdown()  # a thread holds what it ran last
    gc.collect()
    await asyncio.sleep(0)
    assert unheard == []


async def test_an_environment_with_proxies_changes_nothing(threads, monkeypatch):
    async with receiving(Receiver()) as receiver, receiving(Receiver()) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        await Poster(LOOPBACK, threads, 5).post(receiver.url, b"{}", {})
        assert (len(receiver.came), proxy.came) == (1, [])
