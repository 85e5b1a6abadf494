"""`headgate export` and `rerate`: whole files, exact numbers, texts that no spreadsheet runs."""

from __future__ import annotations

import asyncio
import csv
import json
from decimal import Decimal
from pathlib import Path

import pytest
from billing_world import CLOSED_MS, PERIOD, START, month_of_traffic, tenants_with_keys
from click.testing import CliRunner
from migrated import migrated_database
from money import posting, record
from sqlalchemy import insert, select, text

from accounting.billing import invoices
from accounting.billing.residency_sums import HOUR_MS
from accounting.database.db import Database
from accounting.exports import exports, focus
from accounting.prices import prices
from accounting.requests import request_postings
from accounting.tables.models import Tenant
from accounting.tables.residency_models import ResidencyCharge
from accounting.values.types import Rates, Usage
from gateway.cli.main import main
from gateway.cli.whole_file import whole_file

MONTH = ("--from", "2025-09-01", "--to", "2025-10-01")


@pytest.fixture
async def url(database_url):
    await migrated_database(database_url)
    database = Database(database_url)
    owners = await tenants_with_keys(database, 3)
    await month_of_traffic(database, owners, 30)
    async with database.write() as conn:
        await conn.execute(text("UPDATE tenant SET name = '=1+1' WHERE name = 'tenant 0'"))
    await invoices.close(database, owners[0][0], PERIOD, now_ms=CLOSED_MS, actor="a")
    yield database_url
    await database.close()


async def headgate(url: str, tmp_path: Path, *arguments: str) -> tuple[int, str]:
    command = [*arguments, "--home", str(tmp_path)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env={"HEADGATE_DATABASE_URL": url})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


async def one(url: str, statement: str):
    database = Database(url)
    async with database.read() as conn:
        row = (await conn.execute(text(statement))).one()
    await database.close()
    return tuple(map(int, row))


async def test_the_ledger_is_the_same_in_three_formats(url, tmp_path):
    found = {}
    for kind in ("csv", "jsonl", "parquet"):
        out = tmp_path / f"x.{kind}"
        status, said = await headgate(url, tmp_path, "export", "ledger", *MONTH, "--format", kind, "--out", str(out))
        assert (status, "90 rows" in said) == (0, True), said
        found[kind] = out
    pyarrow = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.read_table(found["parquet"])
    assert table.schema.metadata[b"headgate.schema_version"] == exports.SCHEMA_VERSION.encode()
    rows = table.to_pylist()
    assert [json.loads(line) for line in found["jsonl"].read_text().splitlines()] == rows
    with found["csv"].open(newline="") as file:
        records = list(csv.DictReader(file))
    assert [int(r["charge"]) for r in records] == [r["charge"] for r in rows]
    assert tuple(records[0]) == exports.LEDGER_COLUMNS
    assert sum(r["charge"] for r in rows) == (await one(url, "SELECT sum(charge) FROM ledger_entry"))[0]


async def test_only_rows_that_write_off_name_a_reason(database_url):
    await migrated_database(database_url)
    database = Database(database_url)
    async with database.write() as conn:
        endings = [
            posting("req_paid", Usage(0, 0, 5, 7), write_off="resume"),
            posting("req_left", Usage(0, 0, 5, 7), outcome="client_gone", write_off="late_abort"),
            posting("req_lost", kind="void", outcome="worker_crash", write_off="worker_crash"),
        ]
        await request_postings.post(conn, 0, 1, endings)
        counted = [record("req_paid", Usage(0, 0, 5, 7)), record("req_left", Usage(0, 0, 5, 9), seq=2)]
        await request_postings.post_engine_records(conn, [*counted, record("req_lost", Usage(0, 0, 3, 1), seq=3)])
    rows = [row._mapping async for page in exports.ledger_rows(database, 0, 2**40) for row in page]
    await database.close()
    assert sorted((row["request_id"], row["kind"], row["write_off"], row["output"]) for row in rows) == [
        ("req_left", "late_abort", "late_abort", 2),
        ("req_left", "settle", "", 7),
        ("req_lost", "void", "", 0),
        ("req_lost", "worker_crash", "worker_crash", 1),
        ("req_paid", "settle", "", 7),
    ]


async def test_pages_of_any_size_have_every_row_once(url):
    database = Database(url)
    for read, number in ((exports.ledger_rows, 90), (exports.usage_rows, None)):
        whole = [tuple(row) async for page in read(database, 0, 2**40) for row in page]
        assert number in (None, len(whole))
        for page_rows in (1, 7, 90):
            pages = read(database, 0, 2**40, page_rows)
            assert [tuple(row) async for page in pages for row in page] == whole
    await database.close()


async def test_focus_adds_up_to_the_charges_and_names_the_invoice(url, tmp_path):
    status, output = await headgate(url, tmp_path, "export", "focus", *MONTH, "--format", "jsonl")
    assert status == 0
    rows = [json.loads(line, parse_float=Decimal, parse_int=Decimal) for line in output.splitlines() if line[0] == "{"]
    charged, tokens = await one(
        url, "SELECT sum(charge), sum(cache_read + cache_write + uncached + output) FROM ledger_entry"
    )
    usage = [row for row in rows if row["ChargeCategory"] == "Usage"]
    assert sum(row["BilledCost"] for row in usage) * 10**6 == charged
    (due,) = await one(url, "SELECT due FROM invoice_terms WHERE number = 'INV-000001'")
    assert sum(row["BilledCost"] for row in rows if row["InvoiceId"] == "INV-000001") * 10**6 == due
    assert sum(row["ConsumedQuantity"] for row in usage) == tokens
    assert sum(row["PricingQuantity"] for row in usage) * 10**6 == tokens
    assert {row["InvoiceId"] for row in rows} == {"INV-000001", None}
    assert set(rows[0]) == set(focus.COLUMNS)
    # Who has a sheet of its own pays less than the list price.
    assert any(row["ListCost"] > row["BilledCost"] for row in rows)


@pytest.mark.parametrize("byte_hours", [1, 123_456_789_001])
async def test_kept_kv_of_any_number_of_bytes_is_in_focus_of_each_format(url, tmp_path, byte_hours):
    """Parquet had six places for GB-hours, and the export ended with an error."""
    pyarrow = pytest.importorskip("pyarrow.parquet")
    database = Database(url)
    async with database.write() as conn:
        tenant_id = await conn.scalar(select(Tenant.id).limit(1))
        kept = {"request_id": "kept_1", "attempt": 0, "tenant_id": tenant_id, "model": "m", "hour": START}
        kept |= {"price_version": "standard@1", "currency": "USD", "pinned": 0, "charge_cache": 1, "charge_pinned": 0}
        await conn.execute(insert(ResidencyCharge).values(**kept, cache=byte_hours * HOUR_MS, posted_at_ms=1))
    await database.close()
    found = {}
    for kind in ("csv", "jsonl", "parquet"):
        out = tmp_path / f"x.{kind}"
        status, said = await headgate(url, tmp_path, "export", "focus", *MONTH, "--format", kind, "--out", str(out))
        assert status == 0, said
        found[kind] = out
    with found["csv"].open(newline="") as file:
        records = list(csv.DictReader(file))
    lines = [json.loads(line, parse_float=Decimal) for line in found["jsonl"].read_text().splitlines()]
    assert pyarrow.read_table(found["parquet"]).to_pylist() == lines
    for rows in (records, lines):
        [kept] = [row for row in rows if row["SkuMeter"] == "residency_cache"]
        assert Decimal(kept["PricingQuantity"]) * 10**9 == int(kept["ConsumedQuantity"]) == byte_hours


async def test_csv_runs_no_formula(url, tmp_path):
    _, output = await headgate(url, tmp_path, "export", "focus", *MONTH)
    assert '"\'=1+1"' in output
    assert '"=1+1"' not in output


async def test_an_export_that_is_stopped_leaves_nothing(tmp_path):
    target = tmp_path / "out.csv"
    target.write_text("before")

    def stopped() -> None:
        with whole_file(target) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


async def test_rerating_by_the_same_sheet_changes_nothing_and_by_another_says_how_much(url, tmp_path):
    before = await one(url, "SELECT count(*), sum(charge) FROM ledger_entry")
    double = Rates(20, 20, 20, 20)
    database = Database(url)
    async with database.write() as conn:
        await prices.create_sheet(conn, "flat", "USD", 1)
        rates = {(m, t): double for m in "mn" for t in ("interactive", "batch")}
        await prices.add_version(conn, "flat", rates, 0)
    await database.close()
    status, output = await headgate(url, tmp_path, "rerate", "--period", PERIOD, "--sheet", "flat", "--json")
    assert status == 0
    lines = json.loads(output)
    assert sum(line["charged"] for line in lines) == before[1]
    assert all(line["difference"] == line["rerated"] - line["charged"] for line in lines)
    assert sum(line["rerated"] for line in lines) < before[1]
    assert await one(url, "SELECT count(*), sum(charge) FROM ledger_entry") == before
    status, output = await headgate(url, tmp_path, "rerate", "--period", PERIOD, "--sheet", "none")
    assert (status, "no price sheet" in output) == (1, True)
