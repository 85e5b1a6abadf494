"""`headgate batches`: what a tenant asks about its batches, with the tenant's own key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import click
import msgspec

from gateway.cli.answers import FIELDS, Grid, one_sentence, show
from gateway.cli.api import check_is_headgate, distrusted, refusal, silent
from gateway.cli.chat_client import ChatClient
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.groups import Commands
from gateway.cli.money import shown

ANSWER_S = 300.0
"""The longest time without a byte: a large file is uploaded, and counted for up to 20 seconds."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")


@click.command(epilog=example_text("batches estimate requests.jsonl"))
@click.argument("file", type=click.File("rb"))
@click.option(
    "--endpoint", type=click.Choice(ENDPOINTS), default=ENDPOINTS[0], show_default=True, help="Endpoint of its lines."
)
@click.option("--skip-invalid", is_flag=True, help="Leave out invalid lines, as a batch can.")
@click.option("--lines", type=click.IntRange(1, 50_000), help="Most lines whose tokens are counted.  [default: 2000]")
@home_option
@json_option
def estimate(file: BinaryIO, endpoint: str, skip_invalid: bool, lines: int | None, home: Path, as_json: bool) -> None:
    """Say what a batch of the lines in FILE would cost, before it is submitted.

    FILE is uploaded and deleted again; nothing runs. The key is HEADGATE_API_KEY if that is a tenant's, else the one of
    the first start.
    """
    options: dict[str, Any] = {"invalid_lines": "skip"} if skip_invalid else {}
    asked = {"endpoint": endpoint, "headgate": options | ({} if lines is None else {"max_counted_lines": lines})}
    with one_sentence():
        answer = asyncio.run(_estimate(ChatClient.of(home), file, asked))
    show(answer, _drawn, as_json)


async def _estimate(client: ChatClient, file: BinaryIO, asked: dict[str, Any]) -> dict[str, Any]:
    """Uploads the file, asks, and deletes the file. Raises `ApiFailed`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=ANSWER_S)
    headers = {"authorization": f"Bearer {client.key}"}
    form = aiohttp.FormData(
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    )
    form.add_field("file", file, filename="estimate.jsonl", content_type="application/jsonl")
    async with aiohttp.ClientSession(connector=client.server.connector(), headers=headers, timeout=timeout) as session:
        made = await _asked(client, session.post(f"{client.server.base}/v1/files", data=form))
        try:
            body = {"input_file_id": made["id"], **asked}
            return await _asked(client, session.post(f"{client.server.base}/v1/batches/estimate", json=body))
        finally:
            await _asked(client, session.delete(f"{client.server.base}/v1/files/{made['id']}"))


async def _asked(client: ChatClient, call: Any) -> dict[str, Any]:
    try:
        async with call as answer:
            check_is_headgate(client.url, answer)
            content = await answer.read()
            if answer.status != 200:
                raise refusal(client.url, answer.status, content)
            return msgspec.json.decode(content, type=dict[str, Any])
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        raise distrusted(client.url, error) or silent(client.url, str(error) or type(error).__name__) from None


def _drawn(found: dict[str, Any]) -> tuple[Grid, ...]:
    currency = found["currency"]
    counted = f"{found['num_counted_lines']:,}" + (
        " (a sample: the sums are in proportion)" if found["is_sampled"] else ""
    )
    share = found["cached_share"]
    rows: list[tuple[str, Any]] = [
        ("model", found["model"]),
        ("lines", f"{found['num_lines']:,}"),
        ("invalid lines", f"{found['num_invalid_lines']:,}"),
        ("counted lines", counted),
        ("refused of them", f"{found['num_refused_lines']:,}"),
        ("prompt tokens", f"{found['num_prompt_tokens']:,}"),
        ("cached share", "" if share is None else f"{share:.1%}"),
        ("most output tokens", f"{found['max_output_tokens']:,}"),
        ("costs at least", shown(found["least_charge_micro_units"], currency)),
        ("is likely to cost", shown(found["likely_charge_micro_units"], currency)),
        ("costs at most", shown(found["max_charge_micro_units"], currency)),
        ("expected_finish_at", found["expected_finish_at"]),
        ("outlook", found["outlook"].replace("_", " ")),
        *(("because", reason["message"]) for reason in found["reasons"]),
    ]
    grid = Grid(FIELDS, rows)
    faults = [(one["line"], one["code"], one["message"]) for one in found["errors"]["data"]]
    return (grid, Grid(("line", "code", "message"), faults)) if faults else (grid,)


COMMANDS: tuple[click.Command, ...] = (
    Commands("batches", help="Ask about batches with a tenant's key.", commands=[estimate]),
)
