"""The rows of the table about upstreams: `headgate upstreams`."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from gateway.cli.admin_commands import Fields, argument, group, option, row, several
from gateway.cli.answers import fields

PATH = "/admin/v1/upstreams"
KINDS = click.Choice(["openai", "anthropic", "azure"])


def _declared(given: Fields) -> Fields:
    """Makes models of `SERVED=THEIRS`, and takes the credential from a variable or a file: never from the command line,
    which other users of the machine can read.
    """
    variable, file = given.pop("key_variable"), given.pop("key_file")
    if variable is not None and file is not None:
        raise click.UsageError("Give one of --key-variable and --key-file.")
    if variable is not None:
        if not os.environ.get(variable):
            raise click.UsageError(f"The variable {variable} is not set.")
        given["credential"] = os.environ[variable]
    if file is not None:
        given["credential"] = file.read().strip()
    terms = {
        name: given.pop(name) for name in ("input", "cached", "output", "max_output_tokens", "max_model_len", "task")
    }
    common = {name: value for name, value in terms.items() if value is not None}
    models = {}
    for one in given.pop("models"):
        served, _, theirs = one.partition("=")
        models[served] = common | ({"name": theirs} if theirs else {})
    return {**given, "models": models}


def _rows(given: Fields) -> Fields:
    """Reads rows of JSON: an array, or the `data` of an object."""
    try:
        found = json.load(given.pop("file"))
        rows = found["data"] if isinstance(found, dict) else found
        return {**given, "rows": [_cost(one) for one in rows]}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise click.UsageError(
            "FILE must be JSON rows like {id, provider_id, amount_micro_units, billed_at}."
        ) from None


def _cost(one: dict[str, Any]) -> dict[str, Any]:
    amount = one["amount_micro_units"] if "amount_micro_units" in one else one["amount"]
    return {name: one[name] for name in ("id", "provider_id", "billed_at") if name in one} | {
        "amount_micro_units": amount
    }


UPSTREAMS = group(
    "upstreams",
    "Let servers of others answer for models: any with OpenAI's API, Anthropic, Azure.",
    row(
        "add NAME URL",
        "Add the upstream NAME at URL. Its credential is stored encrypted and never shown.",
        f"POST {PATH}",
        several("--model", "models", help="A model as SERVED, or SERVED=THEIRS"),
        option("--kind", type=KINDS, default="openai", help="The API that it speaks."),
        option("--key-variable", help="Environment variable that holds the credential now."),
        option(
            "--key-file", type=click.File(encoding="utf-8"), help="File with the credential; - reads standard input."
        ),
        option("--task", type=click.Choice(["generate", "embed"]), help="What its models do.  [default: generate]"),
        option("--input", type=float, help="What it charges for a million prompt tokens, in the sheet's currency."),
        option("--cached", type=float, help="What it charges for a million cached tokens.  [default: as --input]"),
        option("--output", type=float, help="What it charges for a million tokens of answers."),
        option(
            "--max-output-tokens", type=click.IntRange(min=1), help="The most tokens of an answer.  [default: 4096]"
        ),
        option("--max-model-len", type=click.IntRange(min=2), help="The longest context.  [default: 131072]"),
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
        shows=("id", "kind", "url", "models", "has_credential"),
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
        warns=lambda _, answer: (
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
        "costs NAME FILE",
        "Compare rows of a provider's bill with what was bought. Each micro-unit is matched, or drift with a name.",
        f"POST {PATH}/{{name}}/costs",
        argument("file", type=click.File(encoding="utf-8")),
        shows=fields,
        reads=_rows,
        example="upstreams costs openrouter bill.json",
    ),
)
