"""Results of a batch as its client follows them: in the order in which lines end, read on from any line, awaited."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner
from gateways import MODEL, RunningGateway, until
from load import stretched
from sqlalchemy import insert

from accounting.access import api_keys
from accounting.batches import batches, files
from accounting.batches.batch_lines import LineEnd, add_ended_lines, end_lines
from accounting.batches.files import FileInfo
from accounting.database import sealing
from accounting.requests import batch_results as pages
from accounting.requests.batch_results import line_id
from accounting.requests.idempotency_store import line_key
from accounting.tables.batch_models import BatchLine
from gateway.base.app_keys import DATABASE, FILES, LIFECYCLE
from gateway.batches import waits
from gateway.batches.filed import LineStarts
from gateway.batches.waits import BATCH_WAITS, BatchWaits
from gateway.cli.main import main
from gateway.idempotency.data_keys import DATA_KEYS
from gateway.routes import downloads
from gateway.routes.batch_results import READ_TURNS

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCOPES = ["chat", "batch", "files:read", "files:write"]
STATUS = "x-headgate-batch-status"


@dataclass
class Followed:
    """A batch of a tenant of its own, which no jobs process runs."""

    gateway: RunningGateway
    tenant_id: str
    key: str
    id: str

    def line_id(self, line_no: int) -> str:
        return line_id(self.id, line_no)

    async def ends(self, *numbers: int) -> None:
        """Ends lines with an answer; those with a negative number with an error."""
        data_key = await self.gateway.app[DATA_KEYS].key(self.tenant_id)
        async with self.gateway.app[DATABASE].write() as conn:
            rows = [{"batch_id": self.id, "line_no": abs(no), "custom_id": f"c{abs(no)}"} for no in numbers]
            await conn.execute(insert(BatchLine), rows)
            await end_lines(conn, self.id, [self._end(no, data_key) for no in numbers])

    def _end(self, number: int, data_key: bytes) -> LineEnd:
        line_no = abs(number)
        if number < 0:
            error = {"code": "line_quarantined", "message": "no"}
            return LineEnd(line_no=line_no, custom_id=f"c{line_no}", state="errored", error=error)
        body = sealing.seal(data_key, b'{"text": "%d"}' % line_no, line_key(self.id, line_no).encode())
        return LineEnd(line_no=line_no, custom_id=f"c{line_no}", state="succeeded", status=200, body=body)

    async def completes(self) -> None:
        """Writes the files, as the jobs process does, and ends the batch."""
        data_key, app = await self.gateway.app[DATA_KEYS].key(self.tenant_id), self.gateway.app
        async with app[DATABASE].read() as conn:
            rows = [row async for page in pages.line_pages(conn, self.id) for row in page]
        ids: list[str | None] = []
        async with app[DATABASE].write() as conn:
            for is_output in (True, False):
                lines = [pages.result_line(row, data_key) for row in rows if (row.state == "succeeded") is is_output]
                writer = app[FILES].create(data_key)
                for line in lines:
                    writer.write(line)
                made = await files.create(
                    conn,
                    self.tenant_id,
                    purpose="batch_output",
                    name="out.jsonl",
                    num_bytes=writer.num_bytes,
                    sha256=writer.finish(),
                    storage_key=writer.storage_key,
                    now=int(time.time()),
                )
                ids.append(made.id if lines else None)
            await conn.exec_driver_sql(
                "UPDATE batch SET state = 'completed', output_file_id = ?, error_file_id = ? WHERE id = ?",
                (*ids, self.id),
            )
            await conn.exec_driver_sql("UPDATE batch_line SET body = NULL WHERE batch_id = ?", (self.id,))

    async def results(self, **asked: Any) -> tuple[int, list[Any], str]:
        """The status, the lines or the error, and the batch's status as the answer tells it."""
        return await results(self.gateway, self.id, self.key, **asked)

    async def numbers(self, **asked: Any) -> list[int]:
        status, lines, _ = await self.results(**asked)
        assert status == 200, lines
        return [int(line["custom_id"][1:]) for line in lines]


async def results(gateway: RunningGateway, batch_id: str, key: str, **asked: Any) -> tuple[int, list[Any], str]:
    async with gateway.session(key) as session, session.get(f"/v1/batches/{batch_id}/results", params=asked) as answer:
        lines = [json.loads(line) for line in (await answer.text()).splitlines()]
        return answer.status, lines, answer.headers.get(STATUS, "")


@pytest_asyncio.fixture(loop_scope="module")
async def batch(shared_gateway: RunningGateway) -> AsyncIterator[Followed]:
    tenant_id, key = await shared_gateway.new_tenant("follower", SCOPES)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
    async with shared_gateway.client(key) as client:
        file = await client.files.create(file=("in.jsonl", io.BytesIO(json.dumps(line).encode())), purpose="batch")
        made = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    async with shared_gateway.app[DATABASE].write() as conn:
        await conn.exec_driver_sql("UPDATE batch SET state = 'in_progress', num_total = 9 WHERE id = ?", (made.id,))
    yield Followed(shared_gateway, tenant_id, key, made.id)
    assert not shared_gateway.app[BATCH_WAITS].num


async def test_results_come_in_the_order_of_endings_and_go_on_after_any_line(batch: Followed) -> None:
    await batch.ends(5, -2)
    await batch.ends(7)
    await batch.ends(1, 3)
    status, lines, told = await batch.results()
    assert (status, told) == (200, "in_progress")
    assert [line["id"] for line in lines] == [batch.line_id(no) for no in (2, 5, 7, 1, 3)]
    assert lines[1]["response"]["body"] == {"text": "5"}
    assert (lines[0]["response"], lines[0]["error"]["code"]) == (None, "line_quarantined")
    assert await batch.numbers(after=batch.line_id(7)) == [1, 3]
    assert await batch.numbers(after=batch.line_id(3)) == []
    await batch.ends(4)
    assert await batch.numbers(after=batch.line_id(3)) == [4]


async def test_a_place_holds_when_the_answers_have_moved_to_files(batch: Followed) -> None:
    await batch.ends(5, -2)
    await batch.ends(7, 1)
    await batch.ends(-3)
    before = await batch.results()
    await batch.completes()
    after = await batch.results()
    assert after[:2] == before[:2]
    assert after[2] == "completed"
    assert await batch.numbers(after=batch.line_id(5)) == [1, 7, 3]
    assert await batch.numbers(after=batch.line_id(3), wait=60) == []  # there is nothing to wait for


async def test_files_are_read_in_pages_and_only_where_a_line_is_left(
    batch: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.filed.PART_BYTES", 300)
    await batch.ends(9, 4, 6)
    await batch.ends(8, -1, 2)
    await batch.completes()
    assert await batch.numbers() == [4, 6, 9, 1, 2, 8]
    [output] = await batch.gateway.sql("SELECT output_file_id AS id FROM batch WHERE id = :id", id=batch.id)
    async with batch.gateway.client(batch.key) as client:
        await client.files.delete(output.id)
    status, [refused], _ = await batch.results()
    said = "The output file of this batch is not there any more: it was deleted, or has expired."
    assert (status, refused["error"]["message"], refused["error"]["param"]) == (404, said, "output_file_id")
    assert refused["error"]["code"] == "file_not_found"
    env = {"HEADGATE_URL": batch.gateway.url, "HEADGATE_API_KEY": batch.key}
    done = await asyncio.to_thread(CliRunner().invoke, main, ["batches", "results", batch.id], env=env)
    assert (done.exit_code, said in done.stderr) == (1, True), done.output
    assert await batch.numbers(after=batch.line_id(8)) == []


async def test_only_the_files_in_which_a_line_is_left_are_opened(
    batch: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    files_opened = downloads.opened

    async def noted(request: Any, file: FileInfo) -> Any:
        opened.append(file.id)
        return await files_opened(request, file)

    monkeypatch.setattr(downloads, "opened", noted)
    await batch.ends(9, 4)
    await batch.ends(-1)
    await batch.completes()
    [made] = await batch.gateway.sql("SELECT error_file_id AS id FROM batch WHERE id = :id", id=batch.id)
    assert await batch.numbers(after=batch.line_id(9)) == [1]
    assert opened == [made.id]
    assert await batch.numbers(after=batch.line_id(1)) == []
    assert opened == [made.id]


async def test_clients_that_all_read_a_batch_at_its_end_look_through_its_files_one_after_the_other(
    batch: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decrypted both files at once, and they held the threads of all tenants."""
    under_way: set[LineStarts] = set()
    most: list[int] = []
    take = LineStarts.take

    def slowly(self: LineStarts, parts: Iterator[bytes]) -> bool:
        under_way.add(self)
        most.append(len(under_way))
        time.sleep(0.02)
        if not (has_more := take(self, parts)):
            under_way.discard(self)
        return has_more

    monkeypatch.setattr(LineStarts, "take", slowly)
    await batch.ends(3, -1)
    await batch.ends(2)
    await batch.completes()
    async with batch.gateway.app[READ_TURNS].turn("another tenant"):
        found = await asyncio.gather(*(batch.numbers() for _ in range(4)))
    assert found == [[1, 3, 2]] * 4
    assert max(most) == 1
    assert len(most) >= 8
    assert not batch.gateway.app[READ_TURNS]._locks


async def test_all_that_wait_for_a_batch_read_with_one_connection_at_a_time(
    batch: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they took every connection, and other tenants got 503."""
    num_reading, most, page = 0, 0, pages.ended_page

    async def counted(*asked: Any) -> Any:
        nonlocal num_reading, most
        num_reading += 1
        most = max(most, num_reading)
        try:
            await asyncio.sleep(0.02)
            return await page(*asked)
        finally:
            num_reading -= 1

    monkeypatch.setattr(pages, "ended_page", counted)
    waiting = [asyncio.create_task(batch.numbers(wait=20)) for _ in range(6)]
    await until(lambda: batch.gateway.app[BATCH_WAITS].num == 6)
    await batch.ends(1)
    assert await asyncio.gather(*waiting) == [[1]] * 6
    assert most == 1


async def test_the_end_of_a_batch_between_two_pages_loses_and_repeats_nothing(
    batch: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke then, and the client had to begin anew."""
    monkeypatch.setattr(pages, "PAGE_LINES", 2)
    await batch.ends(5, 3)
    await batch.ends(4, 1)
    read = pages.ended_page

    get = batches.get

    async def committed(conn: Any, *which: Any) -> Any:
        """Each statement sees what is committed by then, as on PostgreSQL."""
        async with batch.gateway.app[DATABASE].read() as other:
            return await get(other, *which)

    async def after_the_end(conn: Any, batch_id: str, after_no: int) -> Sequence[Any]:
        """The end takes the answers from the rows."""
        if after_no == 2:
            await batch.completes()
        async with batch.gateway.app[DATABASE].read() as other:
            return await read(other, batch_id, after_no)

    monkeypatch.setattr(batches, "get", committed)
    monkeypatch.setattr(pages, "ended_page", after_the_end)
    _, lines, _ = await batch.results()
    assert [line["response"]["body"]["text"] for line in lines] == ["3", "5", "1", "4"]


@pytest.mark.parametrize(
    "asked",
    [
        {"after": "x"},
        {"after": ""},
        {"after": "batch_req_0_1"},
        {"after": "batch_req_{id}_"},
        {"after": "batch_req_{id}_2"},
        {"after": "batch_req_{id}_-1"},
        {"after": "batch_req_{id}_99999999999999999999"},
        {"after": "batch_req_{id}_1\N{ARABIC-INDIC DIGIT ONE}"},
        {"after": "' OR 1=1 --"},
        {"after": "\0"},
        {"wait": "-1"},
        {"wait": "61"},
        {"wait": "9" * 18},
        {"wait": "9" * 400},
        {"wait": "soon"},
        {"wait": "1.5"},
        {"wait": "nan"},
    ],
)
async def test_a_place_or_a_wait_that_is_none_is_refused(batch: Followed, asked: dict[str, str]) -> None:
    await batch.ends(1)
    given = {name: value.replace("{id}", batch.id.removeprefix("batch_")) for name, value in asked.items()}
    status, [refused], _ = await batch.results(**given)
    assert (status, refused["error"]["param"]) == (400, next(iter(asked)))


async def test_a_line_that_is_under_way_is_no_place(batch: Followed) -> None:
    async with batch.gateway.app[DATABASE].write() as conn:
        await conn.execute(insert(BatchLine).values(batch_id=batch.id, line_no=1, custom_id="c1"))
    assert (await batch.results(after=batch.line_id(1)))[0] == 400


async def test_another_tenants_batch_is_unknown_with_any_place_and_wait(batch: Followed) -> None:
    await batch.ends(1)
    _, other = await batch.gateway.new_tenant("stranger", SCOPES)
    for asked in ({}, {"after": batch.line_id(1)}, {"after": "x"}, {"wait": 60}):
        refused = await results(batch.gateway, batch.id, other, **asked)
        assert refused[:2] == (await results(batch.gateway, "batch_0", other, **asked))[:2]
        assert refused[0] == 404
    # A place in another batch is none in one's own.
    mine = await batch.results(after=line_id("batch_" + "0" * 48, 1))
    assert mine[0] == 400


async def waiting(batch: Followed, num: int = 1, **asked: Any) -> list[asyncio.Task[tuple[int, list[Any], str]]]:
    tasks = [asyncio.create_task(batch.results(wait=60, **asked)) for _ in range(num)]
    held = batch.gateway.app[BATCH_WAITS]
    await until(lambda: held.num >= num)
    return tasks


async def test_a_wait_ends_with_the_next_lines(batch: Followed) -> None:
    await batch.ends(1)
    [waits_for_more] = await waiting(batch, after=batch.line_id(1))
    await asyncio.sleep(0.1)
    assert not waits_for_more.done()
    await batch.ends(4, 2)
    async with asyncio.timeout(stretched(10)):
        status, lines, told = await waits_for_more
    assert (status, [line["custom_id"] for line in lines], told) == (200, ["c2", "c4"], "in_progress")


async def test_a_wait_is_over_after_its_seconds(batch: Followed) -> None:
    began = time.monotonic()
    assert await batch.results(wait=1) == (200, [], "in_progress")
    assert 0.9 < time.monotonic() - began < 10


async def test_a_wait_goes_on_while_a_batch_only_changes_its_state(batch: Followed) -> None:
    async with batch.gateway.app[DATABASE].write() as conn:
        await conn.exec_driver_sql("UPDATE batch SET state = 'validating' WHERE id = ?", (batch.id,))
    [waits_for_more] = await waiting(batch)
    async with batch.gateway.app[DATABASE].write() as conn:
        await conn.exec_driver_sql("UPDATE batch SET state = 'in_progress' WHERE id = ?", (batch.id,))
    await asyncio.sleep(1.2)
    assert not waits_for_more.done()
    await batch.ends(3)
    assert [line["custom_id"] for line in (await waits_for_more)[1]] == ["c3"]


@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_a_wait_ends_with_the_batch_and_has_the_lines_that_were_cut_off(batch: Followed, end: str) -> None:
    [waits_for_more] = await waiting(batch)
    async with batch.gateway.app[DATABASE].write() as conn:
        if end == "cancelled":
            await batches.cancel(conn, batch.tenant_id, batch.id, int(time.time()), actor="me")
        cut = [
            LineEnd(line_no=no, custom_id=f"c{no}", state=end, error={"code": f"batch_{end}", "message": "no"})
            for no in (1, 2)
        ]
        await add_ended_lines(conn, batch.id, cut)
    async with asyncio.timeout(stretched(10)):
        _, lines, _ = await waits_for_more
    assert [line["error"]["code"] for line in lines] == [f"batch_{end}"] * 2
    [waits_for_end] = await waiting(batch, after=lines[-1]["id"])
    async with batch.gateway.app[DATABASE].write() as conn:
        await conn.exec_driver_sql(f"UPDATE batch SET state = '{end}' WHERE id = ?", (batch.id,))
    async with asyncio.timeout(stretched(10)):
        assert await waits_for_end == (200, [], end)


async def test_a_client_that_leaves_gives_its_place_back(batch: Followed) -> None:
    tasks = await waiting(batch, 3)
    held = batch.gateway.app[BATCH_WAITS]
    for task in tasks:
        task.cancel()
    await until(lambda: held.num == 0)
    await until(lambda: held._looking is None)  # nobody looks for nobody
    assert not held._waiting


async def test_a_drain_ends_all_waits_at_once(batch: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LOOK_EVERY_S", 30.0)
    tasks = await waiting(batch, 3)
    draining = batch.gateway.app[LIFECYCLE].draining
    try:
        began = time.monotonic()
        draining.set()
        assert await asyncio.gather(*tasks, batch.results(wait=60)) == [(200, [], "in_progress")] * 4
        assert time.monotonic() - began < 5
    finally:
        draining.clear()


async def test_a_key_that_is_revoked_while_it_waits_gets_no_lines(batch: Followed) -> None:
    [waits_for_more] = await waiting(batch)
    async with batch.gateway.app[DATABASE].write() as conn:
        [mine] = (await api_keys.list_keys(conn, batch.tenant_id)).items
        await api_keys.revoke(conn, batch.tenant_id, mine.id, now=int(time.time()))
    await asyncio.sleep(1.5)  # the gateway reads the epoch once a second
    await batch.ends(1)
    status, [refused], _ = await waits_for_more
    assert (status, refused["error"]["code"]) == (401, "invalid_api_key")


async def test_an_input_that_is_deleted_while_a_client_waits_changes_nothing(batch: Followed) -> None:
    [waits_for_more] = await waiting(batch)
    [made] = await batch.gateway.sql("SELECT input_file_id AS id FROM batch WHERE id = :id", id=batch.id)
    async with batch.gateway.client(batch.key) as client:
        await client.files.delete(made.id)
    await batch.ends(6)
    assert [line["custom_id"] for line in (await waits_for_more)[1]] == ["c6"]


async def test_many_waits_are_one_query_each_half_second(batch: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[Any] = []
    progress = batches.progress

    async def counted(conn: Any, batch_ids: Any) -> Any:
        asked_for.append(batch_ids)
        return await progress(conn, batch_ids)

    monkeypatch.setattr(batches, "progress", counted)
    tasks = await waiting(batch, 20)
    asked_for.clear()
    await asyncio.sleep(2.2)
    assert 1 <= len(asked_for) <= 5
    await batch.ends(1)
    assert all([line["custom_id"] for line in lines] == ["c1"] for _, lines, _ in await asyncio.gather(*tasks))


async def test_a_tenant_that_waits_too_often_is_told_to_come_later_and_takes_no_place_of_others(
    batch: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = batch.gateway.app
    held = BatchWaits(app, most=4)
    monkeypatch.setitem(app._state, BATCH_WAITS, held)
    tasks = [asyncio.create_task(batch.results(wait=60)) for _ in range(2)]
    await until(lambda: held.num == 2)
    async with batch.gateway.session(batch.key) as session:
        async with session.get(f"/v1/batches/{batch.id}/results", params={"wait": 60}) as refused:
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        async with session.get(f"/v1/batches/{batch.id}/results") as at_once:
            assert at_once.status == 200
    with held._places.place("another tenant") as has_place:
        assert has_place
    await batch.ends(1)
    await asyncio.gather(*tasks)
