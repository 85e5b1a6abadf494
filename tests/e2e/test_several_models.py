"""Two models behind one gateway, as an operator starts them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import openai
import pytest
from load import stretched
from running import start

from gateway.cli.model import demo_model_path


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    home = tmp_path_factory.mktemp("two")
    other = home / "other"
    shutil.copytree(demo_model_path(), other)
    server = start(home / "home", "--model", "headgate-demo", "--model", f"second={other}")
    yield server
    assert server.stop(signal.SIGTERM) == 0, server.output.read_text()


def ask(server, model: str, **more):
    return server.client().completions.create(model=model, prompt="import json\n", max_tokens=8, temperature=0, **more)


def test_both_answer_and_both_are_metered(two):
    first, second = ask(two, "headgate-demo"), ask(two, "second")
    assert (first.model, second.model) == ("headgate-demo", "second")
    assert first.choices[0].text == second.choices[0].text  # the same weights
    two.verify_books()
    page = two.admin(
        "GET",
        "/v1/organization/usage/completions",
        params={"start_time": int(time.time()) - 3600, "bucket_width": "1h", "group_by": "model"},
    )
    counted = {row["model"]: row["output_tokens"] for bucket in page["data"] for row in bucket["results"]}
    assert counted == {"headgate-demo": first.usage.completion_tokens, "second": second.usage.completion_tokens}


def test_the_list_names_both_with_context_and_capabilities(two):
    listed = {model.id: model.model_dump() for model in two.client().models.list()}
    assert set(listed) == {"headgate-demo", "second"}
    for model in listed.values():
        assert model["max_model_len"] > 0
        assert model["capabilities"] == ["completions", "chat"]


def test_the_start_shows_each_model_its_workers_and_its_memory(two):
    printed = two.output.read_text()
    for name in ("headgate-demo", "second"):
        assert f"{name}: 1 worker, " in printed
        assert f"  model       {name}\n" in printed
    assert two.ready["models"]["second"] == {"path": str(Path(two.ready["models"]["second"]["path"])), "workers": [1]}


def test_a_worker_that_dies_does_not_stop_the_other_model(two):
    (slot,) = two.ready["models"]["second"]["workers"]
    pid = two.ready["pids"]["worker"][slot]
    os.kill(pid, signal.SIGKILL)
    for _ in range(5):
        assert ask(two, "headgate-demo").usage.completion_tokens == 8
    deadline = time.monotonic() + stretched(60)
    while two.ready["pids"]["worker"][slot] == pid or not serves(two, "second"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def serves(server, model: str) -> bool:
    try:
        return bool(ask(server, model))
    except openai.APIStatusError:
        return False


def test_models_are_added_and_removed_while_the_others_serve(start_server, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(demo_model_path(), other)
    home = tmp_path / "home"
    home.mkdir()
    file = home / "headgate.toml"
    first = '[models.first]\npath = "headgate-demo"\naliases = ["one"]\n'
    second = f'[models.second]\npath = "{other}"\nprice = {{ input = 1, output = 2 }}\n'
    file.write_text(first)
    server = start_server(home="home")
    assert ask(server, "one").usage.completion_tokens == 8
    pid = server.ready["pids"]["worker"][0]

    file.write_text(first + second)
    assert "Served now: first, second." in server.command("reload").stdout
    assert ask(server, "second").model_extra["headgate"]["charge_micro_units"] > 0
    assert server.ready["pids"]["worker"][0] == pid

    file.write_text(first.replace("one", "uno") + f'[models.broken]\npath = "{tmp_path}"\n')
    assert "The models stay as they were: " in server.command("reload").stderr
    assert ask(server, "one").usage.completion_tokens == 8

    file.write_text(second.replace("]", ']\naliases = ["uno"]', 1))
    assert "Served now: second." in server.command("reload").stdout
    assert ask(server, "uno").model == "uno"
    with pytest.raises(openai.NotFoundError):
        ask(server, "first")
    assert not Path(f"/proc/{pid}").exists()
    server.verify_books()
