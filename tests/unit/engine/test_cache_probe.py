"""What a probe says is what a request then finds, and looking changes nothing."""

from array import array

from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request

from workers.protocol.frames import FrameReader
from workers.protocol.frames import encode as frame
from workers.protocol.messages import CacheProbe, CacheProbed, Region

LONG = encode("the quick brown fox jumps over the lazy dog")


def probe_of(request, **changes):
    fields = {"peek_id": 7, "root": request.root, "namespace": request.namespace, "prompt": request.prompt} | changes
    return CacheProbe(**fields)


def answer(drive: Driver, message: CacheProbe) -> CacheProbed:
    out = drive.engine.step([(LINK, message)])
    (found,) = [m for link, m in out.messages if link == LINK and isinstance(m, CacheProbed)]
    assert found.peek_id == 7
    return found


def driver() -> Driver:
    return Driver(ScriptedRunner(num_blocks=64, block_size=4))


def test_it_tells_what_the_next_request_reads():
    drive = driver()
    request = generate_request("r", LONG, 4)
    assert answer(drive, probe_of(request)).num_cached_tokens == 0
    drive.send(request)
    drive.run()
    found = answer(drive, probe_of(request)).num_cached_tokens
    drive.send(generate_request("again", LONG, 4))
    drive.run()
    assert found == drive.endings[LINK, "again"].usage.cache_read > 0


def test_walls_and_opt_outs_hold_here_too():
    drive = driver()
    request = generate_request("r", LONG, 4)
    drive.send(request)
    drive.run()
    other = (Region(b"another tenant's"),)
    assert answer(drive, probe_of(request, namespace=other)).num_cached_tokens == 0
    assert answer(drive, probe_of(request, cache_read=False)).num_cached_tokens == 0


def test_what_would_be_refused_is_said():
    drive = driver()
    request = generate_request("r", LONG, 4)
    assert answer(drive, probe_of(request, root="other")).num_cached_tokens == -1
    twice = (Region(b"a" * 16, 4), Region(b"a" * 16))
    assert answer(drive, probe_of(request, namespace=twice)).num_cached_tokens == -1


def test_it_changes_nothing():
    drive = driver()
    drive.send(generate_request("r", LONG, 4))
    drive.run()
    cache = drive.engine.cache
    before = (cache.num_free, cache.num_evictable, cache.counts, cache._num_handles)
    for _ in range(3):
        answer(drive, probe_of(generate_request("x", LONG, 4)))
    assert (cache.num_free, cache.num_evictable, cache.counts, cache._num_handles) == before


def test_both_cross_the_wire_as_they_are():
    messages = [
        CacheProbe(3, "root", (Region(b"x" * 16, 32), Region(b"y" * 16)), array("i", (1, 2, 3)), False),
        CacheProbed(3, 48, 1200),
        CacheProbed(4),
    ]
    data = b"".join(map(frame, messages))
    reader = FrameReader()
    found = [m for i in range(0, len(data), 5) for m in reader.feed(data[i : i + 5])]
    assert found == messages
