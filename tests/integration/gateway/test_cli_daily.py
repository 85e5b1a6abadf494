"""The commands of each day against a gateway with a worker: `status`, `top`, `chat`, `requests follow`, `doctor`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gateways import MODEL, RunningGateway
from load import stretched

from accounting.values import clock
from gateway.books.bookkeeping import BOOKKEEPING
from gateway.cli.exit_codes import FAILED, OK
from gateway.cli.main import main

HEADGATE = str(Path(sys.executable).parent / "headgate")


async def headgate(
    gateway: RunningGateway, *arguments: str, text: str = "", key: str = "", **env: str
) -> tuple[int, str, str]:
    """(status, output, errors) of a command, in a thread beside the gateway's loop."""
    command = ["--home", str(gateway.settings.home), *arguments]
    env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": key or gateway.keys.admin_key, **env}
    done = await asyncio.to_thread(CliRunner().invoke, main, command, input=text, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.asyncio(loop_scope="module")
async def test_status_says_what_runs_and_that_it_is_healthy(shared_gateway: RunningGateway) -> None:
    status, output, _ = await headgate(shared_gateway, "status")
    assert (status, "is healthy" in output, "w0" in output or "ready" in output) == (OK, True, True), output
    _, output, _ = await headgate(shared_gateway, "--json", "status")
    found = json.loads(output)
    assert found["healthy"] and found["url"] == f"{shared_gateway.url}/v1"
    assert [one["state"] for one in found["workers"]] == ["ready"]


@pytest.mark.asyncio(loop_scope="module")
async def test_status_without_an_admin_key_says_what_it_has_not_looked_at(shared_gateway: RunningGateway) -> None:
    status, output, _ = await headgate(shared_gateway, "status", key=shared_gateway.keys.api_key)
    assert status == OK
    assert "is healthy as far as it was looked at" in output
    assert "workers and books: NOT looked at. There is no admin key: set HEADGATE_API_KEY" in output
    _, output, _ = await headgate(shared_gateway, "--json", "status", key=shared_gateway.keys.api_key)
    assert json.loads(output)["not_looked_at"].startswith("There is no admin key")
    _, output, _ = await headgate(shared_gateway, "--json", "status")
    assert json.loads(output)["not_looked_at"] is None
    _, output, _ = await headgate(shared_gateway, "status", "--help")
    assert "Without an admin key" in output


async def test_status_fails_where_no_model_is_served(bare_gateway: RunningGateway) -> None:
    status, output, _ = await headgate(bare_gateway, "status")
    assert status == FAILED
    assert "NOT healthy" in output


async def test_status_tells_of_the_checks_of_the_books(gateway: RunningGateway) -> None:
    """Of each minute's check by itself, and of the whole ledger's once somebody asked for it."""
    await gateway.app[BOOKKEEPING].once(clock.now_ms())
    _, output, _ = await headgate(gateway, "status")
    assert "books: in order, checked" in output
    assert "the whole ledger: never" in output
    async with gateway.session(gateway.keys.admin_key) as session:
        await session.post("/admin/v1/verify-books")
    _, output, _ = await headgate(gateway, "status")
    assert re.search(r"the whole ledger: \d+ s ago, in order", output), output


async def test_status_fails_while_the_books_differ(gateway: RunningGateway) -> None:
    gateway.app[BOOKKEEPING].watched = {"as_of": clock.now_ms() // 1000, "failed": ["I3"]}
    status, output, _ = await headgate(gateway, "status")
    assert status == FAILED
    assert "books: FAILED: I3; see `headgate verify-books`" in output


@pytest.mark.asyncio(loop_scope="module")
async def test_chat_prints_the_answer_and_what_it_cost(shared_gateway: RunningGateway) -> None:
    status, output, errors = await headgate(
        shared_gateway, "chat", "--max-tokens", "8", "Hello", key=shared_gateway.keys.api_key
    )
    assert status == OK, errors
    assert output.strip()
    for words in ("first token", "tokens in", "cached)", "out", "USD"):
        assert words in errors
    _, output, _ = await headgate(
        shared_gateway, "chat", "--json", "--max-tokens", "8", text="Hello", key=shared_gateway.keys.api_key
    )
    answer = json.loads(output)
    assert answer["completion_tokens"] == 8
    assert answer["charge_micro_units"] > 0
    assert answer["ttft_s"] >= 0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        (("--model", "nope", "hi"), "", "No model 'nope' is served to this key. Served are: "),
        (("hi",), "hg_live_wrong", "Incorrect API key"),
        (("",), "", "empty"),
    ],
)
async def test_chat_says_in_one_sentence_why_there_is_no_answer(shared_gateway, arguments, key, words) -> None:
    status, _, errors = await headgate(shared_gateway, "chat", *arguments, key=key or shared_gateway.keys.api_key)
    assert status != OK
    assert words in errors.lower() or words in errors, errors


async def test_a_batch_is_submitted_listed_shown_and_cancelled(gateway: RunningGateway, tmp_path: Path) -> None:
    body = {"model": MODEL, "input": "x"}
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}) + "\n")
    _, key = await gateway.new_tenant("by hand", ("embeddings", "batch", "files:read", "files:write"))
    status, output, errors = await headgate(gateway, "batches", "submit", str(file), key=key)
    batch_id = output.strip()
    assert (status, f"`headgate batches watch {batch_id}`" in errors) == (OK, True)
    status, output, _ = await headgate(gateway, "batches", "submit", "-", "--json", text=file.read_text(), key=key)
    second = json.loads(output)
    assert (status, second["status"], second["endpoint"]) == (OK, "validating", "/v1/embeddings")
    _, output, _ = await headgate(gateway, "batches", "list", "--state", "running", key=key)
    assert [one.split()[:2] for one in output.splitlines()[1:]] == [
        [second["id"], "validating"],
        [batch_id, "validating"],
    ]
    _, output, _ = await headgate(gateway, "batches", "show", batch_id, key=key)
    assert re.search(r"endpoint +/v1/embeddings", output)
    assert re.search(r"cost so far +0\.000000 USD", output)
    assert (await headgate(gateway, "batches", "results", batch_id, key=key))[:2] == (OK, "")
    status, _, errors = await headgate(gateway, "batches", "retry", batch_id, key=key)
    assert (status, "has not ended" in errors) == (FAILED, True)
    assert (await headgate(gateway, "batches", "cancel", batch_id, key=key))[:2] == (OK, "cancelling\n")
    for words in (("show",), ("cancel",), ("results",), ("retry",), ("watch",)):
        status, output, errors = await headgate(gateway, "batches", *words, "--json", batch_id)
        assert (status, "Traceback" in errors) == (FAILED, False), words
        assert json.loads(output)["error"]["message"] in errors


@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_of_which_no_batch_came_is_not_kept(shared_gateway: RunningGateway, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("{}\n")
    _, key = await shared_gateway.new_tenant("no chat", ("embeddings", "batch", "files:read", "files:write"))
    status, _, errors = await headgate(shared_gateway, "batches", "submit", str(file), key=key)
    assert (status, "may not use the batch's endpoint" in errors) == (FAILED, True)
    async with shared_gateway.session(key) as session, session.get("/v1/files") as answer:
        assert (await answer.json())["data"] == []


async def test_a_batch_is_estimated_before_it_is_submitted(gateway: RunningGateway, tmp_path: Path) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hello " * 50}]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(line) + "\n{\n")
    key = gateway.keys.api_key
    status, output, errors = await headgate(gateway, "batches", "estimate", "--skip-invalid", str(file), key=key)
    assert status == OK, errors
    for words in ("most output tokens +9", "costs at most +0.0000", "outlook +runs", "2 +invalid_json_line"):
        assert re.search(words, output), (words, output)
    status, output, _ = await headgate(gateway, "batches", "estimate", "--json", str(file), key=key)
    assert json.loads(output)["outlook"] == "fails"
    assert await gateway.sql("SELECT 1 FROM file WHERE deleted_at IS NULL") == []
    status, _, errors = await headgate(
        gateway, "batches", "estimate", "--endpoint", "/v1/embeddings", str(file), key=gateway.keys.admin_key
    )
    assert status != OK and errors


@pytest.mark.asyncio(loop_scope="module")
async def test_top_is_a_plain_table_where_there_is_no_terminal(shared_gateway: RunningGateway) -> None:
    await headgate(shared_gateway, "chat", "--max-tokens", "4", "Hello", key=shared_gateway.keys.api_key)
    status, output, _ = await headgate(shared_gateway, "top")
    assert status == OK
    assert "\x1b" not in output
    assert "prefill tok/s" in output
    status, output, _ = await headgate(shared_gateway, "top", "--json")
    assert {"workers", "fairness", "cache"} <= json.loads(output).keys()


async def test_followed_requests_come_once_and_without_the_operators_own(gateway: RunningGateway) -> None:
    follow = headgate(gateway, "requests", "follow", "--number", "4", "--interval", "0.3", "--json")
    following = asyncio.create_task(follow)
    async with gateway.client() as client:
        while not following.done():
            await client.models.list()
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=2
            )
            await asyncio.sleep(0.1)
    status, output, errors = await following
    assert status == OK, errors
    rows: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 4, rows
    assert {row["endpoint"] for row in rows} == {"GET /v1/models", "POST /v1/chat/completions"}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_doctor_finds_nothing_where_nothing_is_wrong(shared_gateway: RunningGateway) -> None:
    env = {
        "HEADGATE_REDIS_URL": shared_gateway.settings.redis_url,
        "HEADGATE_DATABASE_URL": shared_gateway.settings.sql_url,
    }
    status, output, _ = await headgate(shared_gateway, "doctor", "--json", HEADGATE_PORT="0", **env)
    found = {one["name"]: one for one in json.loads(output)["findings"]}
    assert found["database"]["state"] == found["redis"]["state"] == found["serving"]["state"] == "ok", output
    assert status == (FAILED if any(one["state"] == "failing" for one in found.values()) else OK)


async def test_the_doctor_has_a_remedy_for_each_finding_and_shows_no_secret(bare_gateway: RunningGateway) -> None:
    env = {
        "HEADGATE_REDIS_URL": "redis://u:geheim@127.0.0.1:1/0",
        "HEADGATE_BROKER_URL": "amqp://u:geheim@127.0.0.1:1//",
        "HEADGATE_DATABASE_URL": "postgresql+psycopg://u:geheim@127.0.0.1:1/x",
        "HEADGATE_DRAIN_S": "soon",
        "HEADGATE_PORT": "0",
    }
    status, output, errors = await headgate(bare_gateway, "--json", "doctor", **env)
    found = json.loads(output)["findings"]
    failing = {one["name"] for one in found if one["state"] == "failing"}
    assert status == FAILED
    assert {"settings", "redis", "broker", "database"} <= failing
    assert all(one["fix"] for one in found if one["state"] != "ok")
    assert "geheim" not in output + errors
    _, output, errors = await headgate(bare_gateway, "doctor", **env)
    assert "geheim" not in output + errors


def test_a_home_in_the_working_directory_counts(tmp_path: Path) -> None:
    (tmp_path / ".headgate").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    done = subprocess.run([HEADGATE, "status"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == FAILED
    assert f"There is no home in {tmp_path}/.headgate" in done.stderr


SHELLS = {
    "bash": "source <(headgate completion bash); COMP_WORDS=(headgate te); COMP_WORDS[1]=tenan; COMP_CWORD=1;"
    ' _headgate_completion headgate; echo "${COMPREPLY[@]}"',
    "zsh": "autoload -Uz compinit; compinit -u; source <(headgate completion zsh); whence _headgate_completion;"
    " COMP_WORDS='headgate tenan' COMP_CWORD=1 _HEADGATE_COMPLETE=zsh_complete headgate",
    "fish": "headgate completion fish | source; complete -C 'headgate tenan'",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes_a_command(shell: str, tmp_path: Path) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [path, "-c", SHELLS[shell]], env=env, capture_output=True, text=True, timeout=stretched(60), check=False
    )
    assert "tenants" in done.stdout, (done.stdout, done.stderr)
