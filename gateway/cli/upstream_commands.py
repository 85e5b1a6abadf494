"""The rows of the table about upstreams: `headgate upstreams`."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from gateway.cli import price_sheets
from gateway.cli.admin_commands import Fields, Finite, Whole, argument, group, option, row, several
from gateway.cli.answers import Drawn, Grid, fields
from gateway.cli.api import AdminApi, segment
from gateway.cli.input_files import text_of
from gateway.cli.money import cost
from gateway.cli.times import moment

PATH = "/admin/v1/upstreams"
KINDS = click.Choice(["openai", "anthropic", "azure"])


def _declared(given: Fields) -> Fields:
    """Makes models of `SERVED=THEIRS`, and takes the credential from a variable or a file: never from the command line,
    which other users of the machine can read.
    """
    given["credential"] = _credential(given, "key")
    given["cost_credential"] = _credential(given, "costs_key")
    costs = {name: value for name in ("url", "project") if (value := given.pop(f"costs_{name}")) is not None}
    asked = [*(f"--costs-{name}" for name in costs), *(["--costs"] if given.pop("costs") else [])]
    if given["cost_credential"] is not None:
        given["costs"] = costs
    elif asked:
        raise click.UsageError(
            f"{asked[0]} needs the credential for the cost API: give --costs-key-variable or --costs-key-file."
        )
    terms = {
        name: given.pop(name) for name in ("input", "cached", "output", "max_output_tokens", "max_model_len", "task")
    }
    common = {name: value for name, value in terms.items() if value is not None}
    models = {}
    for one in given.pop("models"):
        served, _, theirs = one.partition("=")
        if served in models:
            raise click.UsageError(f"--model names {served} twice.")
        models[served] = common | ({"name": theirs} if theirs else {})
    return {**given, "models": models}


def _credential(given: Fields, name: str) -> str | None:
    """Takes a credential from where two options say. Raises UsageError."""
    variable, file = given.pop(f"{name}_variable"), given.pop(f"{name}_file")
    flag = name.replace("_", "-")
    if variable is not None and file is not None:
        raise click.UsageError(f"Give one of --{flag}-variable and --{flag}-file.")
    if file is not None:
        content = text_of(file, f"--{flag}-file").strip()
        if not content:
            raise click.UsageError(f"--{flag}-file is empty.")
        return content
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise click.UsageError(f"The variable {variable} is not set.")
    return os.environ[variable]


def _rows(given: Fields) -> Fields:
    """Reads rows of JSON: an array, or the `data` of an object. Raises UsageError."""
    file = given.pop("file")
    if file is None:
        return given
    if any(given[name] is not None for name in ("days", "date")):
        raise click.UsageError("--days and --date are about what the cost API told: give them without FILE.")
    try:
        found = json.loads(text_of(file, "FILE"))
        rows = found["data"] if isinstance(found, dict) else found
        return {"name": given["name"], "rows": [_cost(one) for one in rows]}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise click.UsageError(
            "FILE must be JSON rows like {id, provider_id, amount_micro_units, billed_at}."
        ) from None


def _costs(api: AdminApi, given: Fields) -> Any:
    """Adds the rows of a file; without one, reads the days that the cost API has told."""
    path = f"{PATH}/{segment(given.pop('name'))}/costs"
    return api.call("POST", path, given) if "rows" in given else api.read(path, given)


def _shown(answer: dict[str, Any]) -> Drawn | tuple[Drawn, ...]:
    if "lines" in answer:
        columns = ("line_item", "amount", "revision", "is_in_force", "pulled_at")
        return Grid(columns, [[_amount(one) if n == "amount" else one[n] for n in columns] for one in answer["lines"]])
    return _days(answer) if "days" in answer else fields(answer)


def _amount(line: dict[str, Any]) -> str:
    return cost(line["amount_micro_units"], line["currency"])


def _days(answer: dict[str, Any]) -> tuple[Drawn, ...]:
    """Returns when costs were read, a row for each day, and the sums."""
    currency = answer["currency"]
    when = "never" if answer["pulled_at"] is None else moment(answer["pulled_at"])
    fault = f" The last reading failed: {answer['fault']}." if answer["fault"] else ""
    hint = "" if answer["is_read"] else " No cost API is declared, so nothing is read (docs/upstreams.md)."
    columns = ("date", "billed", "expected", "matched", "drift", "account", "credit", "num_calls", "num_unsure")
    amounts = ("billed", "expected", "matched", "drift", "credit")
    rows = [
        [cost(one[f"{name}_micro_units"], currency) if name in amounts else one[name] for name in columns]
        for one in answer["days"]
    ]
    totals = answer["totals"]
    sums = [
        (name, cost(totals[f"{name}_micro_units"], currency)) for name in ("billed", "expected", "matched", "credit")
    ]
    sums += [(f"drift, {name}", cost(amount, currency)) for name, amount in totals["drift_micro_units"].items()]
    sums += [("billed, not compared", cost(n, other)) for other, n in totals["other_currencies_micro_units"].items()]
    return f"Costs were read: {when}.{fault}{hint}", Grid(columns, rows), "", Grid(("sum", "amount"), sums)


def _cost(one: dict[str, Any]) -> dict[str, Any]:
    amount = one["amount_micro_units"] if "amount_micro_units" in one else one["amount"]
    return {name: one[name] for name in ("id", "provider_id", "billed_at") if name in one} | {
        "amount_micro_units": amount
    }


def _gaps(made: dict[str, Any]) -> str | None:
    from accounting.prices.prices import DEFAULT_SHEET  # it loads SQLAlchemy

    return price_sheets.gaps(DEFAULT_SHEET, made)


UPSTREAMS = group(
    "upstreams",
    "Let servers of others answer for models: any with OpenAI's API, Anthropic, Azure.",
    row(
        "add NAME URL",
        "Add the upstream NAME at URL. Its credential is stored encrypted and never shown.",
        f"POST {PATH}",
        several("--model", "models", help="A model as SERVED, or SERVED=THEIRS", required=True),
        option("--kind", type=KINDS, default="openai", help="The API that it speaks."),
        option("--key-variable", help="Environment variable that holds the credential now."),
        option(
            "--key-file", type=click.File(encoding="utf-8"), help="File with the credential; - reads standard input."
        ),
        option("--task", type=click.Choice(["generate", "embed"]), help="What its models do.  [default: generate]"),
        option("--input", type=Finite(), help="What it charges for a million prompt tokens, in the sheet's currency."),
        option("--cached", type=Finite(), help="What it charges for a million cached tokens.  [default: as --input]"),
        option("--output", type=Finite(), help="What it charges for a million tokens of answers."),
        option("--max-output-tokens", type=Whole(1), help="The most tokens of an answer.  [default: 4096]"),
        option("--max-model-len", type=Whole(2), help="The longest context.  [default: 131072]"),
        option("--api-version", help="Version of the API that Azure or Anthropic is asked for."),
        option(
            "--continuous-usage", is_flag=True, default=None, show_default=False, help="Ask for usage in each chunk."
        ),
        option(
            "--rank", type=click.IntRange(0, 1000), help="Order of the upstreams of a model: the lowest is tried first."
        ),
        option(
            "--max-running", type=click.IntRange(1, 10_000), help="The most requests there at one time.  [default: 64]"
        ),
        option("--costs", is_flag=True, help="Read what the provider bills by the day, from its cost API."),
        option("--costs-key-variable", help="Environment variable that holds the credential for the cost API now."),
        option(
            "--costs-key-file", type=click.File(encoding="utf-8"), help="File with the credential for the cost API."
        ),
        option("--costs-project", help="The one project or workspace whose costs count.  [default: all]"),
        option("--costs-url", help="Base URL of the cost API.  [default: URL]"),
        shows=("id", "kind", "url", "models", "has_credential"),
        warns=lambda _, made: _gaps(made),
        reads=_declared,
        example="upstreams add openrouter https://openrouter.ai/api/v1 --model llama=meta-llama/llama-3.1-8b-instruct"
        " --key-variable OPENROUTER_API_KEY --input 0.05 --output 0.08",
    ),
    row(
        "list",
        "List the upstreams. The breaker is `closed` while all is well, `open` while nothing is sent.",
        f"GET {PATH}",
        shows=("id", "kind", "breaker", "running", "first_token_ms", "models", "url"),
    ),
    row(
        "show NAME",
        "Show the upstream NAME: its state, what was bought in 30 days, and its bill.",
        f"GET {PATH}/{{name}}",
        shows=fields,
    ),
    row(
        "check NAME",
        "Ask the upstream NAME whether address and credential are right. It costs nothing.",
        f"POST {PATH}/{{name}}/check",
        shows=("id", "ok", "reason", "took_ms", "breaker"),
        fails=lambda answer: (
            None if answer["ok"] else f"The upstream does not answer as it should: {answer['reason']}."
        ),
    ),
    row(
        "remove NAME",
        "Remove the upstream NAME and its credential. Requests that run there go on.",
        f"DELETE {PATH}/{{name}}",
        shows="id",
    ),
    row(
        "costs NAME [FILE]",
        "Compare what the provider bills by the day with what was bought; or, with FILE, rows of its bill with single"
        " requests. Each micro-unit is matched, or drift with a name.",
        _costs,
        argument("file", type=click.File(encoding="utf-8"), required=False),
        option("--days", type=click.IntRange(1, 366), help="The number of days.  [default: 31]"),
        option("--date", help="Show all lines of this one day with their corrections, like 2026-10-31."),
        shows=_shown,
        reads=_rows,
        example="upstreams costs openai\nupstreams costs openrouter bill.json",
    ),
    row(
        "pull NAME",
        "Read now what the provider bills by the day. A gateway does it every hour.",
        f"POST {PATH}/{{name}}/costs/pull",
        shows=("id", "ok", "fault", "num_lines", "num_changed"),
        fails=lambda answer: None if answer["ok"] else f"The costs could not be read: {answer['fault']}.",
    ),
)
