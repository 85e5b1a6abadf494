"""The table of administration agrees with the API, and the help of every command is text that a stranger understands."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from gateway.app import routes
from gateway.cli.admin_commands import RowCommand, argument, row
from gateway.cli.answers import show
from gateway.cli.api import AdminApi, ApiFailed
from gateway.cli.main import main
from workers.engine.commands.calibrate_command import main as calibrate
from workers.engine.commands.plan_command import main as plan

OWN_HELP = {("plan",): plan, ("calibrate",): calibrate}
"""These commands hand all arguments on to another module, which has the help."""
SHARED = {"home", "as_json", "yes", "end_streams"}
NO_SENTENCE = re.compile(r"(Of|With|Without|In|Instead|As|By|For|From|If|Until|Up|Only|May|Also|Exclusive|Inclusive)\b")


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    context = click.Context(group)
    found: dict[tuple[str, ...], click.Command] = {}
    for name in group.list_commands(context):
        at, command = (*path, name), group.get_command(context, name)
        assert command is not None
        found |= leaves(command, at) if isinstance(command, click.Group) else {at: OWN_HELP.get(at, command)}
    return found


COMMANDS = leaves(main)
CALLS = {
    at: command
    for at, command in COMMANDS.items()
    if isinstance(command, RowCommand) and isinstance(command.row.does, str)
}
SERVED = {f"{route.method} {re.sub('{.*?}', '{}', route.path)}": route for route in routes()}
each_command = pytest.mark.parametrize(("at", "command"), COMMANDS.items(), ids=lambda one: str(one))


def route_of(command: RowCommand) -> Any:
    return SERVED.get(re.sub("{.*?}", "{}", str(command.row.does)))


def test_most_of_administration_is_rows():
    assert len(CALLS) > 40


@pytest.mark.parametrize(("at", "command"), CALLS.items(), ids=lambda one: str(one))
def test_each_row_calls_a_route_that_is_served(at, command):
    route = route_of(command)
    assert route is not None, command.row.does
    assert route.scope == ("admin" if command.row.api is AdminApi else "batch")


@pytest.mark.parametrize(("at", "command"), CALLS.items(), ids=lambda one: str(one))
def test_each_option_of_a_row_is_a_field_of_the_body(at, command):
    """A row whose options become other fields has a function for that, and tests of its own."""
    takes = route_of(command).takes
    if takes is None or command.row.reads is not None:
        return
    known = {one.encode_name for one in msgspec.structs.fields(takes)}
    in_path = set(re.findall(r"{(\w+)}", command.row.does))
    sent = {one.name for one in command.params} - SHARED - in_path - {"idempotency_key"} | command.row.fixed.keys()
    sent = {command.row.tenant_field if name == "tenant" else name for name in sent}
    assert sent <= known


@each_command
def test_each_command_says_in_sentences_what_it_does(at, command):
    text = (command.help or "").partition("\n\n")[0]
    assert re.match(r"[A-Z][a-z]+,? \w", text), text
    assert text.rstrip().endswith("."), text


@each_command
def test_each_option_has_help_that_stands_alone(at, command):
    for one in command.params:
        if isinstance(one, click.Option):
            assert one.help, (at, one.name)
            assert one.help[0].isupper(), (at, one.help)
            assert not NO_SENTENCE.match(one.help), (at, one.help)
            assert len(one.help.split()) >= 2, (at, one.help)


@each_command
def test_a_command_that_needs_more_than_a_name_has_an_example(at, command):
    own = [one for one in command.params if one.name not in SHARED]
    needed = [one for one in own if one.required]
    if (len(own) > 1 and needed) or len(needed) > 1:
        assert "Example:" in (command.epilog or ""), at


@pytest.mark.parametrize(
    "example",
    [
        line.strip()
        for command in COMMANDS.values()
        for line in (command.epilog or "").splitlines()
        if line.strip().startswith("headgate ")
    ],
)
def test_each_example_can_be_typed(example, tmp_path, monkeypatch):
    """All of it is understood: nothing runs in an empty home, and nothing is asked or started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text("You are kind.")
    (tmp_path / "bill.json").write_text("[]")
    (tmp_path / "requests.jsonl").write_text("{}")
    words = shlex.split(re.split(" [<>|]", example)[0])[1:]
    names = tuple(words[: next(n for n in (1, 2) if tuple(words[:n]) in COMMANDS)])
    asked = ["--yes"] if any(one.name == "yes" for one in COMMANDS[names].params) else []
    with COMMANDS[names].make_context(names[-1], [*words[len(names) :], *asked]) as context:
        assert context.command is COMMANDS[names]


def test_an_example_is_the_end_of_the_help():
    output = CliRunner().invoke(main, ["budgets", "add", "--help"], terminal_width=100).output
    assert output.rstrip().endswith("headgate budgets add acme --limit 25.00 --period month")
    assert "Example:" in output


def test_a_name_in_a_path_cannot_leave_it(monkeypatch):
    called: list[str] = []

    def call(self, method, path, *more, **other):
        called.append(f"{method} {path}")
        return {"id": "x"}

    monkeypatch.setattr("gateway.cli.api.AdminApi.call", call)
    done = CliRunner().invoke(main, ["adapters", "remove", "../keys/a?b"])
    assert (done.exit_code, called) == (0, ["DELETE /admin/v1/adapters/..%2Fkeys%2Fa%3Fb"])


@pytest.mark.parametrize("name", ["", ".", "..", "../tenants/x", "a/b", "?limit=1", "%2e%2e/x"])
@pytest.mark.parametrize(
    "command", [("requests", "show"), ("tenants", "show"), ("keys", "revoke", "proj_1"), ("tenants", "show", "proj_x/")]
)
def test_a_name_that_leads_elsewhere_is_refused_or_one_segment(command, name, monkeypatch):
    called = []

    async def call(self, method, path, *rest):
        called.append(path)
        raise ApiFailed("no")

    monkeypatch.setattr("gateway.cli.api.AdminApi._call", call)
    given = [*command[:-1], command[-1] + name] if command[-1].endswith("/") else [*command, name]
    done = CliRunner().invoke(main, given)
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.output
    segments = [path.split("/") for path in called]
    assert all(
        "" not in one[1:] and not {".", ".."} & set(one) and "?" not in path
        for one, path in zip(segments, called, strict=True)
    )
    assert all(len(one) == len(segments[0]) for one in segments)


@pytest.mark.parametrize("limit", [1, 99, 100, 101, 250])
def test_a_bound_holds_over_all_pages(limit, monkeypatch):
    asked: list[dict[str, Any]] = []

    def call(self, method, path, body=None, params=None):
        asked.append(params)
        start = int(params.get("after", 0))
        data = [{"id": str(start + n + 1)} for n in range(params["limit"])]
        return {"object": "list", "data": data, "has_more": True}

    monkeypatch.setattr("gateway.cli.api.AdminApi.call", call)
    from gateway.cli.api import PAGE, AdminApi

    found = AdminApi(None).read("/x", {"limit": limit})
    assert [one["id"] for one in found] == [str(n + 1) for n in range(limit)]
    assert max(params["limit"] for params in asked) <= PAGE


def test_a_list_is_read_to_its_end(monkeypatch):
    pages = iter([(["1"], True), (["2", "3"], True), (["4"], False)])

    def call(self, method, path, body=None, params=None):
        data, more = next(pages)
        return {"object": "list", "data": [{"id": one} for one in data], "has_more": more}

    monkeypatch.setattr("gateway.cli.api.AdminApi.call", call)
    from gateway.cli.api import AdminApi

    assert [one["id"] for one in AdminApi(None).read("/x", {})] == ["1", "2", "3", "4"]


def test_a_terminal_is_told_nothing_by_a_name(capsys):
    show([{"id": "x", "name": "a\nb\x1b[31m[red]c\x1b]0;t\x07"}], ("id", "name"), False)
    shown = capsys.readouterr().out
    assert shown.isprintable() or set(shown) - {"\n"} == {char for char in shown if char.isprintable()}
    assert "a\\u000ab\\u001b[31m[red]c" in shown


def test_an_argument_in_brackets_has_the_type_that_the_row_gives_it() -> None:
    """`upstreams costs NAME [FILE]` took the name of the file for its content."""
    given = argument("file", type=click.File(), required=False)
    assert row("costs NAME [FILE]", "Compare costs.", "GET /costs", given, shows="id").params[1].type is given.type
    with pytest.raises(AssertionError, match="does not name"):
        row("costs NAME", "Compare costs.", "GET /costs", given, shows="id")
