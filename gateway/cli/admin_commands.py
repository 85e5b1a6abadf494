"""A command of administration is a row of a table: what is typed, its help, the HTTP call that it makes, its options,
and what it shows of the answer. This module makes a click command of each row. It knows no row.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import click

from gateway.cli.answers import Shows, one_sentence, show, warn
from gateway.cli.api import AdminApi, ApiFailed, segment
from gateway.cli.common import confirmation, example_text, home_option, json_option
from gateway.cli.exit_codes import FAILED
from gateway.cli.groups import Commands

Fields = dict[str, Any]
"""The values of a command's arguments and options by the names that the API has for them."""


MOST = 2**53 - 1
"""The largest number that every JSON reader keeps exact."""


class Whole(click.IntRange):
    """A parameter type: a whole number in a range, and at most as large as the API takes one."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        found = super().convert(value, param, ctx)
        if found > MOST:
            self.fail(f"{value} is more than {MOST}.", param, ctx)
        return found


class OrNone(Whole):
    """A parameter type: a number, or `none` for the default."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value == "none" else super().convert(value, param, ctx)


class Finite(click.types.FloatParamType):
    """A parameter type: a number that is neither infinite nor `nan`, which JSON cannot say."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def argument(name: str, **how: Any) -> click.Argument:
    return click.Argument([name], **how)


def option(*names: str, **how: Any) -> click.Option:
    """Makes an option. A name without dashes is its name in the API, if that differs from the flag's. A default is part of the help."""
    return click.Option(names, show_default=how.pop("show_default", "default" in how), **how)


def several(*names: str, help: str, default: str = "", type: Any = str, required: bool = False) -> click.Option:
    """Makes an option that may be repeated. `default` says what is meant without it."""
    return option(
        *names,
        multiple=True,
        type=type,
        required=required,
        help=f"{help}; may be repeated.{default and f'  [default: {default}]'}",
    )


def idempotency_key(promise: str) -> click.Option:
    """Makes the option of a command that may be repeated safely. `promise` says what the same key does."""
    return option(
        "--idempotency-key",
        callback=_sendable,
        default=lambda: str(uuid.uuid4()),
        show_default="a new key",
        help=f"Key for safe repeats: {promise}.",
    )


def _sendable(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not (value and value.isascii() and value.isprintable()):
        raise click.BadParameter(f"{value[:80]!r} is not printable ASCII characters.", ctx, param)
    return value


COUNT = OrNone(min=0)
ONE_TENANT = "Id or name of the one tenant.  [default: every tenant]"
REQUEST_LIMITS = (
    option("--requests-per-minute", "max_requests_per_1_minute", type=COUNT, help="The most requests a minute."),
    option("--tokens-per-minute", "max_tokens_per_1_minute", type=COUNT, help="The most tokens a minute."),
    option("--running", "max_running_requests", type=COUNT, help="The most requests that run at one time."),
)
END_STREAMS = option(
    "--end-streams/--let-streams-finish",
    default=None,
    show_default=False,
    help="End running requests too, within 5 seconds, or let them finish.  [default: end them if access is taken away]",
)


@dataclass(frozen=True)
class Row:
    """A command of administration. Each given value is sent under its name: in the query of a GET, otherwise in the body.
    Some names have a meaning of their own:

    - `tenant` is the id or the name of a tenant, and its id is sent;
    - `end_streams` becomes the parameter `revoke` of the query;
    - `idempotency_key` becomes the header of that name;
    - `limit` of a list bounds the objects of all pages together.
    """

    does: str | Callable[[AdminApi, Fields], Any]
    """The call, such as `GET /admin/v1/keys/{key_id}`; a name in braces is filled from an argument. A function stands
    here where one call is not enough. It gets the fields and returns the answer.
    """
    _: KW_ONLY
    shows: Shows
    reads: Callable[[Fields], Fields] | None = None
    """Makes the fields of the API from the options where they are not the same. Raises UsageError."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the body that no option changes."""
    partial: bool = False
    """The call changes only what is given, and needs at least one option. The word `none` sets the default."""
    tenant_field: str = "project_id"
    """The name under which the tenant's id is sent, if it is not in the path."""
    with_archived: bool = False
    """An archived tenant is found by its name too."""
    with_deleted: bool = False
    """A deleted tenant is found too, by its id, which is all that the books have of it."""
    warns: Callable[[Fields, Any], str | None] | None = None
    """Returns a warning about the answer, from the fields that were sent and the answer."""
    fails: Callable[[Any], str | None] | None = None
    """Returns a sentence where the answer says that what was asked did not come about. The command ends with 1 then."""
    api: type[AdminApi] = AdminApi
    """Says whose key makes the call: the operator's, or a tenant's."""
    models: Callable[[Fields], Sequence[str]] | None = None
    """Returns the models that the fields name. A warning says which of them are not served, because they may be mistyped."""

    def fields(self, given: Fields) -> Fields:
        """Returns the fields to send. Raises UsageError."""
        read = {**(given if self.reads is None else self.reads(given)), **self.fixed}
        fields = {name: value for name, value in read.items() if value is not None and value != ()}
        if not self.partial:
            return fields
        if not fields.keys() - {*self._in_path, "end_streams"}:
            raise click.UsageError("Nothing would change: give at least one option.")
        return {name: None if value == "none" else value for name, value in fields.items()}

    def answer(self, api: AdminApi, fields: Fields) -> Any:
        """Makes the call. Returns an object, or the objects of a list. Raises ApiFailed."""
        fields = dict(fields)
        if "tenant" in fields:
            tenant = fields["tenant"]
            fields["tenant"] = (
                api.billed(tenant) if self.with_deleted else api.project(tenant, archived=self.with_archived)["id"]
            )
        if not isinstance(self.does, str):
            return self.does(api, fields)
        method, _, path = self.does.partition(" ")
        path = path.format(**{name: segment(str(fields.pop(name))) for name in self._in_path})
        if "tenant" in fields:
            fields[self.tenant_field] = fields.pop("tenant")
        if method == "GET":
            return api.read(path, dict(_parameter(name, value) for name, value in fields.items()))
        query, key = _revoking(fields.pop("end_streams", None)), fields.pop("idempotency_key", None)
        answer = api.call(method, path, fields or None, query, headers=key and {"idempotency-key": key})
        return answer["data"] if answer.get("object") == "list" else answer

    @property
    def _in_path(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.does) if isinstance(self.does, str) else []


class RowCommand(click.Command):
    """The command of a row."""

    def __init__(self, row: Row, **how: Any) -> None:
        super().__init__(callback=self._run, **how)
        self.row = row

    def _run(self, home: Path, as_json: bool, **given: Any) -> None:
        fields = self.row.fields(given)
        with one_sentence():
            api = self.row.api(home)
            answer = self.row.answer(api, fields)
            if callable(self.row.shows) and not as_json:
                answer = api.named(answer)
        failure = None if self.row.fails is None else self.row.fails(answer)
        if failure is None or as_json or not isinstance(self.row.shows, str):
            show(answer, self.row.shows, as_json)
        if failure is not None:
            click.echo(f"headgate: {failure}", err=True)
            raise SystemExit(FAILED)
        if self.row.models is not None and (sentence := not_served(api, self.row.models(fields))) is not None:
            warn(sentence)
        if self.row.warns is not None and (sentence := self.row.warns(fields, answer)) is not None:
            warn(sentence)


def row(
    usage: str,
    help: str,
    does: str | Callable[[AdminApi, Fields], Any],
    *params: click.Parameter,
    example: str = "",
    confirm: str | Callable[[click.Context], str] | None = None,
    **how: Any,
) -> RowCommand:
    """Makes a command. `usage` is its name and its arguments as help shows them: `[TENANT]` may be left out. Of `params`
    are the options, and the arguments that are more than a word. `example` is what an operator would type, and `confirm`
    the question that is answered with yes, or skipped with `--yes`. The rest are fields of the row.
    """
    name, *words = usage.split()
    special = {one.human_readable_name: one for one in params if isinstance(one, click.Argument)}
    assert special.keys() <= {word.strip("[]") for word in words}, f"{usage} does not name {list(special)}"
    arguments = [special.get(word.strip("[]")) or _argument(word) for word in words]
    options = [one for one in params if isinstance(one, click.Option)]
    # A negative amount looks like an option.
    context = {"ignore_unknown_options": any(getattr(one.type, "signed", False) for one in arguments)}
    made = RowCommand(
        Row(does, **how),
        name=name,
        help=help,
        params=[*arguments, *options],
        epilog=example_text(example),
        context_settings=context,
    )
    made = json_option(home_option(made))
    return made if confirm is None else confirmation(confirm)(made)


def group(name: str, help: str, *commands: click.Command) -> click.Group:
    return Commands(name, help=help, commands=commands)


def not_served(api: AdminApi, models: Sequence[str]) -> str | None:
    """Returns a sentence about the models that the gateway does not serve."""
    if not models:
        return None
    with suppress(ApiFailed):
        served = api.call("GET", "/admin/v1/settings")["models"]
        if unknown := [model for model in models if model not in served]:
            are = "is not" if len(unknown) == 1 else "are not"
            return f"{', '.join(unknown)} {are} served now; served are: {', '.join(served) or 'none'}."
    return None


def _argument(word: str) -> click.Argument:
    return argument(word.strip("[]").lower(), required=not word.startswith("["))


def _revoking(end_streams: bool | None) -> dict[str, str]:
    """Returns the query parameter for the choice. None leaves it to the server's default."""
    return {} if end_streams is None else {"revoke": "immediate" if end_streams else "graceful"}


def _parameter(name: str, value: Any) -> tuple[str, Any]:
    """Returns one parameter of a query in the API's notation."""
    if isinstance(value, bool):
        return name, str(value).lower()
    return (f"{name}[]", list(value)) if isinstance(value, tuple) else (name, value)
