"""`headgate batches`: a tenant submits, follows, cancels and retries its batches, with its own key."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from accounting.values.types import ENDED_BATCH
from gateway.cli.admin_commands import option, row
from gateway.cli.answers import FIELDS, Grid, fields, one_sentence, show, warn
from gateway.cli.api import ApiFailed, TenantApi, segment
from gateway.cli.batch_calls import RETRY_OF, BatchCalls, Followed, Result
from gateway.cli.batch_retry import Sorted, as_value, sort
from gateway.cli.batch_watch import LOOK_S, duration, failure, watch, whole
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.exit_codes import FAILED, INTERRUPTED
from gateway.cli.groups import Commands
from gateway.cli.money import cost, shown

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
ESTIMATE_EXPIRES_S = 3600
MOST_METADATA = 16
"""The most entries that the metadata of a batch may have."""
COLUMNS = ("id", "status", "model", "lines", "answered", "failed", "time left", "cost so far", "created_at")

interval_option = click.option(
    "--interval",
    default=LOOK_S,
    show_default=True,
    type=click.FloatRange(0.2, 3600),
    metavar="S",
    help="Seconds between two looks.",
)


class _FirstLine(msgspec.Struct):
    url: str


@click.command(
    epilog=example_text("batches submit requests.jsonl --watch\nbatches submit requests.jsonl > batch-id.txt")
)
@click.argument("file", type=click.File("rb"))
@click.option(
    "--endpoint", type=click.Choice(ENDPOINTS), help="Endpoint of its lines.  [default: the url of the first line]"
)
@click.option("--skip-invalid", is_flag=True, help="Run the other lines where some are invalid.")
@click.option("--watch", "watches", is_flag=True, help="Show progress until the batch has ended.")
@home_option
@json_option
def submit(file: BinaryIO, endpoint: str | None, skip_invalid: bool, watches: bool, home: Path, as_json: bool) -> None:
    """Upload the lines in FILE and make a batch of them. Prints the batch's id.

    With --watch it shows progress, and ends with status 0 if the batch completes. Ctrl-C leaves the batch running.
    """
    name = os.path.basename(getattr(file, "name", "")) or "requests.jsonl"
    with one_sentence(), _seekable(file) as lines:
        wanted: dict[str, Any] = {"endpoint": endpoint or _endpoint(lines)}
        options = {"headgate": {"invalid_lines": "skip"}} if skip_invalid else {}
        api = TenantApi(home)
        batch = asyncio.run(_create(api, lines, name, wanted | options))
        _made(api, batch, watches, as_json)


def _seekable(file: BinaryIO) -> BinaryIO:
    """Returns the file, or a copy of one that is read once, such as standard input."""
    if file.seekable():
        return file
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    shutil.copyfileobj(file, copy)
    copy.seek(0)
    return copy


def _endpoint(file: BinaryIO) -> str:
    """Returns the url of the first line. What is wrong with that line is said once the batch is checked. Raises UsageError
    if there is none.
    """
    first = file.readline()
    if not first:
        raise click.UsageError("FILE is empty.")
    try:
        url = msgspec.json.decode(first, type=_FirstLine).url
    except msgspec.MsgspecError:
        url = ""
    file.seek(0)
    return url if url in ENDPOINTS else ENDPOINTS[0]


async def _create(api: TenantApi, file: BinaryIO, name: str, batch: dict[str, Any]) -> dict[str, Any]:
    async with BatchCalls.of(api) as calls:
        return await calls.create(file, name, batch)


def _made(api: TenantApi, batch: dict[str, Any], watches: bool, as_json: bool) -> None:
    """Says which batch was made, and watches it if asked to."""
    if not watches:
        show(batch, "id", as_json)
        if not as_json:
            click.echo(f"headgate: `headgate batches watch {batch['id']}` shows its progress.", err=True)
        return
    if not as_json:
        click.echo(f"headgate: {batch['id']}", err=True)
    _watched(api, batch, LOOK_S, as_json)


def _watched(api: TenantApi, batch: dict[str, Any], interval: float, as_json: bool) -> None:
    ended = watch(api, batch, interval, quiet=as_json)
    show(ended, whole, as_json)
    if (sentence := failure(ended)) is not None:
        click.echo(f"headgate: {sentence}", err=True)
        raise SystemExit(FAILED)
    if not as_json and ended["request_counts"]["failed"]:
        warn(f"Some lines failed: `headgate batches retry {ended['id']}` runs those again that may go well.")


@click.command("watch", epilog=example_text("batches watch batch_0\nbatches watch batch_0 --json | jq .output_file_id"))
@click.argument("batch_id")
@interval_option
@home_option
@json_option
def watch_batch(batch_id: str, interval: float, home: Path, as_json: bool) -> None:
    """Show how the batch BATCH_ID goes until it has ended. Ctrl-C leaves the batch running.

    With --json it prints the batch once, when it has ended. It ends with status 1 unless the batch has completed.
    """
    with one_sentence():
        api = TenantApi(home)
        _watched(api, api.call("GET", f"/v1/batches/{segment(batch_id)}"), interval, as_json)


@click.command(
    epilog=example_text(
        "batches results batch_0 --follow | jq .custom_id\nbatches results batch_0 --follow --output results.jsonl"
    )
)
@click.argument("batch_id")
@click.option("--follow", is_flag=True, help="Go on with each line as it ends, until the batch has ended.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to which the lines are added. One that has lines of this batch is continued after the last one.",
)
@click.option("--after", metavar="LINE_ID", help="Id of the line to go on after.  [default: from the first line on]")
@home_option
@json_option
def results(batch_id: str, follow: bool, output: Path | None, after: str | None, home: Path, as_json: bool) -> None:
    """Print the results of the batch BATCH_ID, one JSON line each, in the order in which its lines end.

    They can be read while the batch runs. An interrupted command goes on where it was: type it again with --output, or
    with --after and the id of the last line. With --json and --output it says what was written.
    """
    output = None if output == Path("-") else output
    if output is not None and after is not None:
        raise click.UsageError("Give one of --output and --after: a file says itself after which line it goes on.")
    found = Followed(after)
    with one_sentence():
        api = TenantApi(home)
        try:
            if output is None:
                asyncio.run(_follow(api, batch_id, found, sys.stdout.buffer, follow))
            else:
                with to_go_on_with(output) as file:
                    found.after = last_line(file, batch_id) if file.readable() else None
                    asyncio.run(_follow(api, batch_id, found, file, follow))
        except KeyboardInterrupt:
            again = f"--output {output}" if output is not None else f"--after {found.after}"
            if output is not None or found.after is not None:
                click.echo(f"headgate: `headgate batches results {batch_id} {again}` goes on from here.", err=True)
            raise SystemExit(INTERRUPTED) from None
    if output is not None and as_json:
        told = {"id": batch_id, "status": found.status, "num_lines": found.num_lines, "after": found.after}
        show(told, fields, as_json)
    elif output is not None:
        status = found.status.replace("_", " ")
        click.echo(f"headgate: {found.num_lines:,} lines were added to {output}; the batch is {status}.", err=True)


def to_go_on_with(output: Path) -> BinaryIO:
    """Opens a file to which lines are added, for this command alone, or a device or pipe, which is only written into. Raises
    `ApiFailed`.
    """
    if output.exists() and not output.is_file():
        return io.BufferedWriter(io.FileIO(output, "w"))
    file = output.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ApiFailed(f"Another command writes to {output} now: name another file, or end that one.") from None
    return file


async def _follow(api: TenantApi, batch_id: str, found: Followed, file: BinaryIO, until_end: bool) -> None:
    def write(line: bytes) -> None:
        file.write(line)
        file.flush()

    async with BatchCalls.of(api) as calls:
        await calls.follow(batch_id, found, write, until_end=until_end)


def last_line(file: BinaryIO, batch_id: str) -> str | None:
    """Returns the id of the last whole result in a file of this batch, and cuts off what follows it. Raises
    `ApiFailed` for a file with anything else.
    """
    file.seek(0)
    last, rest, num_bytes = b"", b"", 0
    for line in file:
        if line.endswith(b"\n"):
            last, num_bytes = line, num_bytes + len(line)
        else:
            rest = line
    begins = b'{"id":"batch_req_%s_' % batch_id.removeprefix("batch_").encode()
    refusal = ApiFailed(f"The file {file.name} has something other than results of {batch_id}: name another one.")
    if (last and not last.startswith(begins)) or rest[: len(begins)] != begins[: len(rest)]:
        raise refusal
    try:
        found = msgspec.json.decode(last, type=Result).id if last else None
    except msgspec.MsgspecError:
        raise refusal from None
    file.truncate(num_bytes)
    return found


@click.command(epilog=example_text("batches retry batch_0 --watch"))
@click.argument("batch_id")
@click.option("--again", is_flag=True, help="Make another batch of lines of which one was made already.")
@click.option("--watch", "watches", is_flag=True, help="Show progress until the new batch has ended.")
@home_option
@json_option
def retry(batch_id: str, again: bool, watches: bool, home: Path, as_json: bool) -> None:
    """Make a new batch of those failed lines of the batch BATCH_ID that may go well now. Prints its id.

    These are lines that did not run before the batch was cancelled or expired, and lines whose last answer was a fault of
    the server or a limit. It says how many others there are, and why they are not retried. Where it has made a batch of
    them already, it makes none and prints the id of that one.
    """
    with one_sentence():
        api = TenantApi(home)
        failed, batch, is_new = asyncio.run(retried(api, batch_id, again=again))
        if batch is None:
            if as_json:
                show(_told(failed, None, is_new), fields, as_json)
            else:
                _tell_left(failed)
            said = "Its failed lines would fail again" if failed.left else "No line of the batch has failed"
            click.echo(f"headgate: {said}: there is nothing to retry.", err=True)
            raise SystemExit(FAILED)
        if as_json and not watches:
            show(_told(failed, batch, is_new), fields, as_json)
            return
        if not as_json:
            already = "" if is_new else f" by {batch['id']} already: no batch was made. --again makes another one"
            click.echo(f"headgate: {_lines(len(failed.retried))} run again{already}.", err=True)
            _tell_left(failed)
        _made(api, batch, watches, as_json)


def _told(failed: Sorted, batch: dict[str, Any] | None, is_new: bool) -> dict[str, Any]:
    return {"batch": batch, "is_new": is_new, "num_retried": len(failed.retried), "not_retried": as_value(failed)}


def _tell_left(failed: Sorted) -> None:
    for one in as_value(failed):
        status = "" if one["status"] is None else f" (status {one['status']})"
        click.echo(
            f"headgate: {_lines(one['num_lines'])} not retried: {one['code']}{status}. {one['reason']}", err=True
        )


def _lines(number: int) -> str:
    return f"{number:,} lines are" if number != 1 else "1 line is"


async def retried(api: TenantApi, batch_id: str, *, again: bool) -> tuple[Sorted, dict[str, Any] | None, bool]:
    """Returns the failed lines, the batch that runs them again if there is one, and whether it was made now. Two commands
    at once make one batch, by their Idempotency-Key. Raises `ApiFailed`.
    """
    async with BatchCalls.of(api) as calls:
        batch = await calls.call("GET", f"/v1/batches/{segment(batch_id)}")
        if batch["status"] not in ENDED_BATCH:
            raise ApiFailed("The batch has not ended. Lines are retried once it has: watch it, or cancel it.")
        if batch["status"] == "failed":
            raise ApiFailed("The batch failed before a line was run: correct the file, and submit it.")
        if batch["error_file_id"] is None:
            return sort([]), None, False
        failed = sort([line async for line in calls.file_lines(batch["error_file_id"], "The error file")])
        if not failed.retried:
            return failed, None, False
        if not again and (made := await calls.newest_retry(batch)) is not None:
            return failed, made, False
        with tempfile.TemporaryFile() as lines:
            number = 0
            async for line in calls.file_lines(batch["input_file_id"], "The input file"):
                number += 1
                if number in failed.retried:
                    lines.write(line + b"\n")
            lines.seek(0)
            metadata = batch["metadata"] or {}
            if RETRY_OF in metadata or len(metadata) < MOST_METADATA:
                metadata |= {RETRY_OF: batch_id}
            wanted = {"endpoint": batch["endpoint"], "metadata": metadata}
            name = f"retry-of-{batch_id}"
            try:
                return failed, await calls.create(lines, f"{name}.jsonl", wanted, None if again else name), True
            except ApiFailed as error:
                if error.code != "idempotency_mismatch":
                    raise
        if (made := await calls.newest_retry(batch)) is not None:
            return failed, made, False
        raise ApiFailed(
            "A batch was made of these lines within the last day: see `headgate batches list`. --again makes another one."
        )


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
        answer = asyncio.run(_estimate(TenantApi(home), file, asked))
    show(answer, _drawn, as_json)


async def _estimate(api: TenantApi, file: BinaryIO, asked: dict[str, Any]) -> dict[str, Any]:
    """Uploads the file, asks, and deletes the file. Raises `ApiFailed`."""
    async with BatchCalls.of(api) as calls:
        file_id = await calls.upload(file, "estimate.jsonl", ESTIMATE_EXPIRES_S)
        try:
            return await calls.call("POST", "/v1/batches/estimate", json={"input_file_id": file_id, **asked})
        finally:
            await calls.call("DELETE", f"/v1/files/{file_id}")


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


def _listed(found: list[dict[str, Any]]) -> Grid:
    rows = []
    for one in found:
        counts, own = one["request_counts"], one["headgate"]
        rows.append(
            (
                one["id"],
                one["status"].replace("_", " "),
                one["model"],
                counts["total"],
                counts["completed"],
                counts["failed"],
                None if own["eta_s"] is None else duration(own["eta_s"]),
                cost(own["charge_micro_units"], own["currency"]),
                one["created_at"],
            )
        )
    return Grid(COLUMNS, rows)


COMMANDS: tuple[click.Command, ...] = (
    Commands(
        "batches",
        help="Submit, follow, cancel and retry batches. The key is HEADGATE_API_KEY if that is a tenant's, else the one"
        " of the first start.",
        commands=[
            estimate,
            submit,
            row(
                "list",
                "List batches, the newest first.",
                "GET /v1/batches",
                option(
                    "--state",
                    type=click.Choice(["running", "any"]),
                    help="Those that have not ended, or all.  [default: any]",
                ),
                option("--limit", default=100, type=click.IntRange(min=1), help="The most batches to list."),
                shows=_listed,
                api=TenantApi,
            ),
            row(
                "show BATCH_ID",
                "Show the batch BATCH_ID: how far it has come, what it cost so far, and how lines failed.",
                "GET /v1/batches/{batch_id}",
                shows=whole,
                api=TenantApi,
            ),
            watch_batch,
            results,
            row(
                "cancel BATCH_ID",
                "Cancel the batch BATCH_ID. Lines that are answered by then are delivered and charged.",
                "POST /v1/batches/{batch_id}/cancel",
                shows="status",
                api=TenantApi,
            ),
            retry,
        ],
    ),
)
