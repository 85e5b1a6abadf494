"""`headgate chat`: a conversation with a served model in the terminal, as any client with a tenant's key has it.

The history is in this process alone. What a model writes is shown without control characters: a terminal receives nothing
by a model.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.cli.answers import one_sentence
from gateway.cli.api import ApiFailed
from gateway.cli.chat_client import Answer, ChatClient
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.input_files import text_of
from gateway.cli.money import cost

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."


@click.command(epilog=example_text('chat\nchat --model my-model "What does json.dumps do?"\nchat --json < prompt.txt'))
@click.argument("prompt", required=False)
@click.option("--model", metavar="NAME", help="Model that answers.  [default: the first one that is served]")
@click.option("--system", metavar="TEXT", help="Text of a system message before the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of an answer.  [default: the model's]")
@click.option("--temperature", type=click.FloatRange(0, 2), help="Randomness of an answer.  [default: the model's]")
@home_option
@json_option
def chat(
    prompt: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    home: Path,
    as_json: bool,
) -> None:
    """Talk with a model. Without PROMPT it is a conversation; standard input that is no terminal is one prompt.

    Below each answer stand the time to its first token, its tokens, how many of the prompt's came from the cache, and
    what it cost. The key is HEADGATE_API_KEY if that is a tenant's, else the one of the first start.
    """
    how = {"max_tokens": max_tokens, "temperature": temperature}
    if prompt is not None and not prompt.strip():
        raise click.UsageError("The prompt is empty: leave it out for a conversation.")
    with one_sentence():
        client = ChatClient.of(home)
        talk = Talk(client, model or client.first_model(), system, how, as_json)
        if prompt is None and not sys.stdin.isatty():
            prompt = _piped()
        if prompt is not None:
            talk.ask(prompt)
        else:
            talk.until_end()


def _piped() -> str:
    text = text_of(sys.stdin, "Standard input")
    if not text.strip():
        raise click.UsageError("The prompt is empty: give PROMPT, or text on standard input.")
    return text


class Talk:
    """One conversation: its messages, and what it has cost so far."""

    def __init__(
        self, client: ChatClient, model: str, system: str | None, how: dict[str, Any], as_json: bool = False
    ) -> None:
        self._client, self._model, self._as_json = client, model, as_json
        self._how = {name: value for name, value in how.items() if value is not None}
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = list(self._first)
        self._cost: dict[str, int] = {}

    def until_end(self) -> None:
        click.echo(f"{self._model} at {self._client.url}. {HELP}", err=True)
        _with_history()
        while True:
            try:
                line = input("\nyou> ").strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                click.echo("", err=True)
                continue
            if line in ("/exit", "/quit"):
                break
            if line == "/reset":
                self._messages = list(self._first)
                click.echo("The conversation begins anew.", err=True)
            elif line:
                try:
                    self.ask(line)
                except KeyboardInterrupt:  # the answer was stopped, and the conversation goes on
                    continue
                except ApiFailed as error:  # the conversation goes on
                    click.echo(f"headgate: {error}", err=True)
        costs = ", ".join(cost(amount, currency) for currency, amount in self._cost.items())
        click.echo(f"\nThe conversation cost {costs or 'nothing'}.", err=True)

    def ask(self, text: str) -> None:
        """Adds one turn. Raises KeyboardInterrupt for an answer that is stopped by Ctrl-C, and then the conversation is as
        it was.
        """
        said = [*self._messages, {"role": "user", "content": text}]
        show: Callable[[str], None] = (lambda _: None) if self._as_json else _write
        try:
            answer = asyncio.run(self._client.stream({"model": self._model, "messages": said, **self._how}, show))
        except KeyboardInterrupt:
            click.echo("\n(stopped; the model is charged for what it wrote)", err=True)
            raise
        self._messages = [*said, {"role": "assistant", "content": answer.text}]
        if answer.charge_micro_units is not None:
            self._cost[answer.currency] = self._cost.get(answer.currency, 0) + answer.charge_micro_units
        if self._as_json:
            click.echo(msgspec.json.encode(answer))
        else:
            click.echo("" if answer.text.endswith("\n") else "\n", nl=False)
            click.echo(click.style(facts(answer), dim=True), err=True)


def facts(answer: Answer) -> str:
    """Returns the line below an answer."""
    parts = [
        "" if answer.ttft_s is None else f"first token {answer.ttft_s:.2f} s",
        f"{answer.prompt_tokens} tokens in ({answer.cached_tokens} cached)",
        f"{answer.completion_tokens} out",
        "" if answer.tokens_per_s is None else f"{answer.tokens_per_s:.1f} tokens/s",
        "" if answer.charge_micro_units is None else cost(answer.charge_micro_units, answer.currency),
        "" if answer.finish_reason in (None, "stop") else f"ended by {answer.finish_reason}",
    ]
    return "[" + ", ".join(part for part in parts if part) + "]"


def harmless(text: str) -> str:
    """Returns a text that a terminal shows and does not obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _write(text: str) -> None:
    click.echo(harmless(text), nl=False)


def _with_history() -> None:
    """Lets arrow keys edit a line and bring lines back, where Python has been built with that."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return


COMMANDS: tuple[click.Command, ...] = (chat,)
