"""However a command ends: one sentence on standard error, its own status, and an object for a program that asked for JSON."""

from __future__ import annotations

import contextlib
import importlib.abc
import io
import json
import os
import stat
import sys

import click
import pytest
from click.testing import CliRunner

from gateway.cli import __main__ as program
from gateway.cli import up
from gateway.cli.api import ApiFailed
from gateway.cli.chat_client import ChatClient
from gateway.cli.ending import NOT_ANSWERED, ended
from gateway.cli.exit_codes import CLOSED, CONFIG, FAILED, FAULT, INTERRUPTED, MEANINGS, OK, USAGE
from gateway.cli.main import main
from gateway.cli.server_place import Server
from gateway.cli.supervisor import ChildFailed, ChildRefused
from gateway.cli.whole_file import whole_file


def raising(error: BaseException):
    def call(self, *args, **how):
        raise error

    return call


ENDS = {
    "an answer": (lambda *_, **__: {"object": "list", "data": [], "has_more": False}, OK, ""),
    "a refusal": (raising(ApiFailed("No.", "nope")), FAILED, "No."),
    "Ctrl-C": (raising(KeyboardInterrupt()), INTERRUPTED, None),
    "a reader that has gone": (raising(BrokenPipeError()), CLOSED, None),
    "a full disk": (raising(OSError(28, "No space left on device")), FAILED, "No space left on device."),
    "a fault of ours": (raising(ZeroDivisionError("x")), FAULT, "This is a fault of Headgate: ZeroDivisionError: x."),
}


def run(*words: str, **how):
    done = CliRunner().invoke(main, [*words], prog_name="headgate", **how)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert done.exit_code in MEANINGS
    return done


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("words", [("--json", "tenants", "list"), ("tenants", "list", "--json"), ("tenants", "list")])
def test_each_end_has_its_status_and_its_sentence(name, words, monkeypatch):
    call, status, said = ENDS[name]
    monkeypatch.setattr("gateway.cli.api.AdminApi.call", call)
    done = run(*words)
    assert done.exit_code == status
    lines = [line for line in done.stderr.splitlines() if line]  # an empty one ends the line of a typed ^C
    assert len(lines) == (1 if said else 0), done.stderr
    assert all(line.startswith(f"headgate: {said}") for line in lines)
    if "--json" in words and said:
        told = json.loads(done.stdout)["error"]
        code = "nope" if name == "a refusal" else None
        assert told == {"message": lines[0].removeprefix("headgate: "), "code": code, "status": status}
    elif said:
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "answer", "says"),
    [
        (
            ("upstreams", "check", "x"),
            {"id": "x", "ok": False, "reason": "credential", "took_ms": 1, "breaker": "closed"},
            "The upstream does not answer as it should: credential.",
        ),
        (
            ("upstreams", "pull", "x"),
            {"id": "x", "ok": False, "fault": "timeout", "num_lines": 0, "num_changed": 0},
            "The costs could not be read: timeout.",
        ),
    ],
    ids=["check", "pull"],
)
def test_what_did_not_come_about_is_shown_and_is_a_failure(words, answer, says, monkeypatch):
    monkeypatch.setattr("gateway.cli.api.AdminApi.call", lambda *_, **__: answer)
    done = run(*words, "--json")
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (FAILED, False)
    done = run(*words)
    assert (done.exit_code, done.stderr) == (FAILED, f"headgate: {says}\n")
    assert "breaker" in done.stdout or "fault" in done.stdout


@pytest.mark.parametrize("words", [("tenants", "archive", "acme"), ("workers", "drain", "worker-0")])
def test_a_question_is_asked_on_standard_error(words, monkeypatch):
    """A program reads the answer on standard output."""
    answer = {"id": "proj_1", "name": "acme", "object": "list", "data": [{"id": "proj_1", "name": "acme"}]}
    if words[0] == "workers":
        answer = {"id": "worker-0", "object": "worker", "running": 0, "num_others_ready": 1}
    monkeypatch.setattr("gateway.cli.api.AdminApi.call", lambda *_, **__: dict(answer))
    done = run(*words, "--json", input="y\n")
    assert done.exit_code == OK
    assert "Go on? [y/N]:" in done.stderr and "Go on?" not in done.stdout
    done = run(*words, "--json", input="n\n")
    assert done.exit_code == FAILED and "Go on?" not in done.stdout
    assert run(*words, "--json", "--yes").stderr == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tenant",), None),
        (("nothing",), "No such command 'nothing'. See `headgate --help`."),
        (("tenants", "create"), "Missing argument 'NAME'. See `headgate tenants create --help`."),
        (("tenants", "list", "--alle"), "No such option '--alle'"),
        (("requests", "list", "--limit", "x"), "Invalid value for '--limit': 'x' is not a"),
        (("completion", "bash", "--json"), "No such option '--json'"),
    ],
)
def test_a_wrong_line_is_one_sentence_with_the_way_to_help(words, says):
    done = run(*words)
    assert done.exit_code == USAGE
    if says is None:
        assert "Usage: headgate tenant" in done.stderr
    else:
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"headgate: {says}") and line.endswith("--help`.")


def test_a_wrong_line_is_an_object_where_json_was_asked_for():
    done = run("requests", "list", "--limit", "x", "--json")
    assert json.loads(done.stdout)["error"]["status"] == USAGE == done.exit_code


def test_a_wrong_variable_is_an_object_where_json_was_asked_for():
    done = run("tenants", "list", "--json", env={"HEADGATE_COFFEE": "1"})
    assert json.loads(done.stdout)["error"]["status"] == CONFIG == done.exit_code


@pytest.mark.parametrize("words", [("tenants", "list"), ("chat", "Hello")])
def test_a_key_that_cannot_be_sent_is_named_and_masked(words):
    done = run(*words, env={"HEADGATE_API_KEY": "hg_live_pw\n"})
    assert done.exit_code == CONFIG
    (line,) = done.stderr.splitlines()
    assert line.startswith("headgate: Cannot use the environment variable HEADGATE_API_KEY = '***': ")
    assert line.endswith("copy it once more.")


@pytest.mark.parametrize("key", ["a\nb", "a\x00", "ü", ""])
def test_an_option_that_cannot_be_sent_is_a_wrong_line(key):
    done = run("credits", "grant", "acme", "1.00", "--idempotency-key", key, env={"HEADGATE_URL": "http://127.0.0.1:1"})
    assert done.exit_code == USAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith("headgate: Invalid value for '--idempotency-key': ")


@pytest.mark.parametrize(("error", "status"), [(ChildRefused("No."), CONFIG), (ChildFailed("No."), FAILED)])
def test_up_ends_as_the_child_that_it_cannot_keep(error, status, tmp_path, monkeypatch):
    async def ends(_):
        raise error

    monkeypatch.setattr(up, "run", ends)
    done = run("up", "--home", str(tmp_path), "--port", "0")
    assert (done.exit_code, done.stderr) == (status, "headgate: No.\n")


def test_what_stands_behind_two_dashes_asks_for_no_json():
    assert run("tenants", "show", "--", "--json", env={"HEADGATE_URL": "http://127.0.0.1:1"}).stdout == ""


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_a_question_without_a_yes_does_nothing(answer, monkeypatch):
    monkeypatch.setattr("gateway.cli.api.AdminApi.call", raising(AssertionError("called")))
    done = run("tenants", "archive", "acme", input=answer)
    assert (done.exit_code, done.stderr.splitlines()[-1].partition("headgate: ")[2]) == (FAILED, NOT_ANSWERED)


def test_ctrl_c_at_a_question_is_no_answer(capsys):
    def asked():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise click.Abort from None  # as click's own prompts do

    with pytest.raises(SystemExit) as ends:
        ended(asked, ())
    assert (ends.value.code, capsys.readouterr().err) == (INTERRUPTED, "")


def test_ctrl_c_while_the_program_is_imported_is_no_traceback(monkeypatch):
    class Interrupted(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path, target=None):
            if fullname == "gateway.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "gateway.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ends:
        program.main()
    assert ends.value.code == INTERRUPTED


@pytest.mark.parametrize(
    ("prompt", "status"), [(("Hello",), INTERRUPTED), ((), OK)], ids=["one prompt", "conversation"]
)
def test_ctrl_c_in_an_answer_ends_a_chat_of_one_prompt_alone(prompt, status, monkeypatch, tmp_path):
    monkeypatch.setattr("gateway.cli.chat_client.ChatClient.of", lambda home: ChatClient(Server("http://h"), "k"))
    monkeypatch.setattr("gateway.cli.chat_client.ChatClient.stream", raising(KeyboardInterrupt()))
    monkeypatch.setattr("gateway.cli.chat._with_history", lambda: None)
    lines = iter(["Hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    stdin = io.StringIO()
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(SystemExit) as ends:
        main(["chat", "--model", "m", "--home", str(tmp_path), *prompt])
    assert ends.value.code == status


def test_streams_that_the_caller_has_closed_are_empty(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    read = []
    with pytest.raises(SystemExit) as ends:
        ended(lambda: read.append(sys.stdin.read()), ())
    assert (ends.value.code, read) == (OK, [""])
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()


def test_what_cannot_be_flushed_is_said_once(monkeypatch, capsys):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as ends:
        ended(lambda: None, ())
    assert ends.value.code == FAILED
    assert capsys.readouterr().err.splitlines()[0].startswith("headgate: No space left on device. Make room")
    sys.stdout.flush()  # the interpreter does so at its end


def test_a_pipe_is_written_into_and_not_replaced(tmp_path):
    """As root, a file that took the place of a device would be the whole machine's."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(path) as file:
        file.write(b"rows")
    assert os.read(reader, 10) == b"rows"
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with whole_file(tmp_path / "link") as file:
        file.write(b"rows")
    assert (tmp_path / "link").is_symlink()
    with contextlib.suppress(KeyboardInterrupt), whole_file(tmp_path / "link") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"rows"


def test_a_file_without_a_folder_is_named_as_it_was_given(tmp_path):
    with pytest.raises(FileNotFoundError) as refused, whole_file(tmp_path / "none" / "rows.csv"):
        pass
    assert refused.value.filename == str(tmp_path / "none" / "rows.csv")


@pytest.mark.parametrize(
    ("words", "content"),
    [
        (("prefixes", "add", "m", "--system-file", "-"), b"\xc3\x28"),
        (("keys", "report-leaked"), b"\xc3\x28"),
        (("keys", "report-leaked"), b""),
    ],
)
def test_input_that_is_no_text_is_a_wrong_line(words, content):
    done = run(*words, input=content)
    assert done.exit_code == USAGE
    assert len(done.stderr.splitlines()) == 1


def test_a_group_alone_shows_its_help_and_is_a_wrong_line():
    assert isinstance(main, click.Group)
    assert run("tenants").exit_code == USAGE
