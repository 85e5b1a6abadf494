import asyncio
import re

import pytest
from engine_driver import Driver
from fakes import ScriptedRunner, generate_request
from load import stretched
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from workers.engine.metrics import Metrics
from workers.engine.ops_server import OpsServer
from workers.process.metrics_text import expose

ACCEPTS = {
    "Prometheus 2.42": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.4,*/*;q=0.1",
    "text": "text/plain",
    "none": "",
}


@pytest.fixture
def metrics():
    """After three requests through a real engine."""
    made = Metrics("model", 1, 4, 64)
    drive = Driver(ScriptedRunner(num_blocks=64, block_size=4))
    drive.send(*[generate_request(f"r{i}", range(97, 120), 9, seed=i) for i in range(3)])
    drive.run().step(after_s=1.1)
    for output in drive.outputs:
        made.observe(output)
    return made


class Service:
    alive = ready = True
    draining = False

    def stop_accepting(self):
        self.draining = True


async def ask(server, request):
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    writer.write(request)
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


@pytest.fixture
async def ops(metrics):
    service = Service()
    server = await OpsServer(service, metrics.registry).listen("127.0.0.1:0", 0)
    server.service = service
    yield server
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("accept", ACCEPTS.values(), ids=ACCEPTS)
def test_names_with_a_colon_survive_every_scraper(metrics, accept):
    reply = expose(metrics.registry, accept)
    parse = openmetrics if "openmetrics" in reply.content_type else plain
    families = {family.name: family for family in parse(reply.body.decode())}
    assert families["vllm:generation_tokens"].samples[0].value == 27
    assert "escaping" not in reply.content_type


def test_every_name_needs_no_escaping(metrics):
    for family in metrics.registry.collect():
        for sample in family.samples:
            assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", sample.name)


def test_figures_are_those_of_the_requests(metrics):
    samples = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            samples[sample.name, *labels.values()] = sample.value
    assert samples["vllm:prompt_tokens_total",] == 3 * 23
    assert samples["vllm:request_success_total", "length"] == 3
    assert samples["vllm:time_to_first_token_seconds_count",] == 3
    assert samples["vllm:inter_token_latency_seconds_count",] == 3 * 8
    assert samples["vllm:inter_token_latency_seconds_bucket", "+Inf"] == 3 * 8
    assert samples["vllm:num_requests_running",] == 0
    assert samples["headgate_cache_blocks", "free"] + samples["headgate_cache_blocks", "evictable"] == 63


async def test_probes_follow_the_service(ops):
    for path in (b"/livez", b"/readyz", b"/health"):
        assert (await ask(ops, b"GET " + path + b" HTTP/1.1\r\n\r\n"))[0] == 200
    ops.service.alive = False
    for path in (b"/livez", b"/readyz"):
        assert (await ask(ops, b"GET " + path + b" HTTP/1.1\r\n\r\n"))[0] == 503


async def test_a_page_in_a_browser_drains_nobody(ops):
    head = b"POST /drain HTTP/1.1\r\nHost: 127.0.0.1:9400\r\nOrigin: https://page.example\r\n\r\n"
    assert (await ask(ops, head))[0] == 404
    assert (await ask(ops, b"GET /readyz HTTP/1.1\r\n\r\n"))[0] == 200


async def test_drain_makes_unready_but_not_dead(ops):
    assert (await ask(ops, b"POST /drain HTTP/1.1\r\n\r\n"))[0] == 202
    assert (await ask(ops, b"GET /readyz HTTP/1.1\r\n\r\n"))[0] == 503
    assert (await ask(ops, b"GET /livez HTTP/1.1\r\n\r\n"))[0] == 200


async def test_metrics_are_served_and_other_paths_are_not(ops):
    status, body = await ask(ops, b"GET /metrics HTTP/1.1\r\nAccept: text/plain\r\n\r\n")
    assert status == 200
    assert "vllm:num_requests_running" in body
    for request in (b"GET /", b"POST /metrics", b"GET /drain", b"nonsense"):
        assert (await ask(ops, request + b" HTTP/1.1\r\n\r\n"))[0] == 404


async def test_a_head_without_end_is_cut_off(ops):
    reader, writer = await asyncio.open_connection(*ops.sockets[0].getsockname()[:2])
    writer.write(b"x" * 40_000)
    try:
        assert await asyncio.wait_for(reader.read(), stretched(3)) == b""
    except ConnectionError:
        pass  # a reset is as good an end
    writer.close()


async def test_an_address_of_ipv6_stands_in_brackets():
    server = await OpsServer(Service(), Metrics("m", 0, 4, 8).registry).listen("[::1]:0", 0)
    assert server.sockets[0].getsockname()[0] == "::1"
    server.close()


async def test_a_taken_default_port_is_replaced_and_a_given_one_is_an_error(ops):
    taken = ops.sockets[0].getsockname()[1]
    other = OpsServer(Service(), Metrics("m", 0, 4, 8).registry)
    with pytest.raises(OSError, match="address already in use"):
        await other.listen(f"127.0.0.1:{taken}", 0)
    server = await other.listen("", taken - 9400)
    assert server.sockets[0].getsockname()[1] != taken
    server.close()
