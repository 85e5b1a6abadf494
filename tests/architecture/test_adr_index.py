"""The index of decision records (docs/adr/README.md) names every record once, by its number and its exact title."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "adr"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| \[(.+)\]\(([^)]+)\) \| (.*?) ?\|$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def title(record: Path) -> tuple[int, str]:
    """Number and words of its first heading."""
    first = record.read_text(encoding="utf-8").splitlines()[0]
    found = re.fullmatch(r"# (\d+)\. (.+)", first)
    assert found is not None, f"{record.name} begins with {first!r}"
    return int(found[1]), found[2]


def test_the_index_has_one_row_for_each_record_with_its_exact_title():
    rows = [(int(number), words, name) for number, words, name, _ in ROW.findall(INDEX)]
    records = [(*title(record), record.name) for record in RECORDS]
    assert len(records) > 60
    assert sorted(rows) == records


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_the_file_name_of_a_record_has_the_number_of_its_title(record):
    assert f"{title(record)[0]:04}" == record.name[:4]


@pytest.mark.parametrize("page", [*RECORDS, FOLDER / "README.md"], ids=lambda page: page.name)
def test_every_page_that_a_record_links_to_is_there(page):
    linked = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in linked if not (FOLDER / link).exists()] == []


def test_a_record_that_was_replaced_says_so_in_the_index():
    replaced = {
        title(record)[0]
        for record in RECORDS
        if re.search(r"^Replaced by ", record.read_text(encoding="utf-8"), re.MULTILINE)
    }
    told = {int(number) for number, _, _, status in ROW.findall(INDEX) if "superseded" in status}
    assert replaced == told != set()
