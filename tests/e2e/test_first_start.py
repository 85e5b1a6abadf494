"""A newcomer's first minutes: start, talk, stop, start again."""

from __future__ import annotations

import os
import signal
import stat
import urllib.request
from pathlib import Path

import pytest
from load import stretched
from tokenizers import Tokenizer


def ask(client, model: str, **more):
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What does json.dumps do?"}], max_tokens=24, **more
    )


@pytest.mark.smoke
def test_the_first_request_succeeds_as_soon_as_the_ready_file_is_there(server):
    reply = ask(server.client(), server.model)
    assert reply.choices[0].message.content
    assert reply.usage.prompt_tokens > 0
    assert 1 <= reply.usage.completion_tokens <= 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@pytest.mark.smoke
def test_a_stream_says_the_same_as_a_whole_reply_under_greedy_decoding(server):
    client = server.client()
    whole = ask(client, server.model, temperature=0)
    pieces, usage = [], None
    for chunk in ask(client, server.model, temperature=0, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.smoke
def test_usage_counts_the_tokens_of_the_models_own_tokenizer(server):
    reply = server.client().completions.create(model=server.model, prompt="import json\n", max_tokens=20, temperature=0)
    tokenizer = Tokenizer.from_file(str(Path(server.ready["model_path"]) / "tokenizer.json"))
    prompt_ids = tokenizer.encode("import json\n").ids
    assert reply.usage.prompt_tokens == len(prompt_ids)


@pytest.mark.smoke
def test_the_ready_file_names_living_processes_and_is_private(server):
    ready = server.ready
    for kind in ("gateway", "worker", "jobs"):
        assert ready["pids"][kind], kind
        for pid in ready["pids"][kind]:
            os.kill(pid, 0)
    os.kill(ready["pids"]["redis"], 0)
    assert stat.S_IMODE(server.ready_file.stat().st_mode) == 0o600


@pytest.mark.smoke
def test_s6_every_process_shows_metrics_where_the_ready_file_says(server):
    shown = {kind: urllib.request.urlopen(urls[0]).read().decode() for kind, urls in server.ready["metrics"].items()}
    assert 'headgate_gateway_up{gateway="0"} 1.0' in shown["gateway"]
    assert "vllm:num_requests_running" in shown["worker"]
    assert 'headgate_webhook_deliveries_total{outcome="dead"} 0.0' in shown["jobs"]


def test_a_second_start_in_the_same_home_finds_the_same_tenant_key_and_ledger(start_server):
    first = start_server()
    before = first.ready
    ask(first.client(), first.model)
    assert first.stop(signal.SIGINT) == 0
    printed = first.output.read_text()
    assert before["api_key"] in printed
    assert before["admin_key"] in printed

    second = start_server()
    after = second.ready
    assert (after["tenant_id"], after["api_key"], after["admin_key"]) == (
        before["tenant_id"],
        before["api_key"],
        before["admin_key"],
    )
    assert before["api_key"] not in second.output.read_text()[len(printed) :], "the key is shown once"
    ask(second.client(), second.model)
    usage = second.admin(
        "GET",
        "/v1/organization/usage/completions",
        params={"start_time": 1_700_000_000, "bucket_width": "1d", "limit": 31, "end_time": 1_700_086_400},
    )
    assert usage["object"] == "page"
    report = second.verify_books()
    assert report["ok"]
    assert num_requests(second) == 2


def num_requests(server) -> int:
    import time

    deadline = time.monotonic() + stretched(10)
    while True:
        page = server.admin(
            "GET",
            "/v1/organization/usage/completions",
            params={"start_time": int(time.time()) - 3600, "bucket_width": "1h"},
        )
        total = sum(r["num_model_requests"] for bucket in page["data"] for r in bucket["results"])
        if total >= 2 or time.monotonic() > deadline:
            return total
        time.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stop_lets_the_running_stream_finish(start_server, number):
    server = start_server()
    stream = server.client().completions.create(
        model=server.model,
        prompt="def f(",
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
    )
    events = iter(stream)
    next(events)
    server.process.send_signal(number)
    usage = None
    for chunk in events:
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == 200
    assert server.process.wait(stretched(60)) == 0
