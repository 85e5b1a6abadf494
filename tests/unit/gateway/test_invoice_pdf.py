"""A drawn invoice: sizes and places of its texts, as a reader of PDF finds them."""

from __future__ import annotations

import io

import msgspec
import pytest
from pypdf import PdfReader

from gateway.billing import pdf
from gateway.billing.document import Document, Row

NAME = "上海示例科技有限公司 — شركة المثال — Société Générale d'Été Ñandú"
SECOND_LINE = "Générale d'Été Ñandú"
BASE = Document(
    title="Invoice",
    number="INV-000001",
    issuer=["Beispiel Rechenzentrum GmbH", "Hauptstraße 1"],
    customer=[NAME, "Nanjing Road 100"],
    facts=[("Period", "2026-10-01 to 2026-10-31 (UTC)")],
    currency="EUR",
    rows=[],
    credits=[],
    totals=[
        ("Subtotal", "88.888824 EUR"),
        ("Net", "88.89 EUR"),
        ("VAT 19 %", "16.89 EUR"),
        ("Amount due", "105.78 EUR"),
    ],
    payment=[("Pay by", "2026-11-30"), ("IBAN", "DE89 3704 0044 0532 0130 00"), ("Reference", "INV-000001")],
    notes=[],
    bars=[],
    highest="",
    country="CN",
)


class Drawn(msgspec.Struct):
    text: str
    size: float
    x: float
    y: float


def drawn(doc: Document) -> list[list[Drawn]]:
    """Returns the pieces of text of each page, in the order in which they are drawn."""
    reader = PdfReader(io.BytesIO(pdf.render(doc, 1_762_000_000)))
    pages = []
    for page in reader.pages:
        pieces: list[Drawn] = []

        def piece(text, _, tm, __, size, pieces=pieces):
            if text.strip():
                pieces.append(Drawn(text.strip(), round(size, 2), tm[4], tm[5]))

        page.extract_text(visitor_text=piece)
        pages.append(pieces)
    return pages


def test_every_line_of_a_name_in_three_scripts_has_one_size():
    (pieces,) = drawn(BASE)
    first = next(i for i, piece in enumerate(pieces) if piece.text == "Customer") + 1
    last = next(i for i, piece in enumerate(pieces) if piece.text == "Nanjing Road 100")
    name = pieces[first:last]
    assert {piece.size for piece in name} == {11.0}, name
    assert name[-1].text == SECOND_LINE


def test_a_row_that_begins_with_a_fallback_font_has_one_size():
    """A heading of 8 points stands before the rows."""
    (pieces,) = drawn(
        msgspec.structs.replace(BASE, rows=[Row("模型 Société", "Générale Ñandú", "1", "2.000000", "3.00")])
    )
    below = next(i for i, piece in enumerate(pieces) if piece.text == "Amount (EUR)") + 1
    row = pieces[below : next(i for i, piece in enumerate(pieces) if piece.text == "3.00") + 1]
    assert {piece.size for piece in row} == {9.0}, row
    assert "Générale Ñandú" in {piece.text for piece in row}


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("Local time", "2026-10-01 02:00 to 2026-11-01 01:00 (America/Argentina/Buenos_Aires)"),
        ("Purchase order", " ".join(["PO-77"] * 12)),
        ("Your reference", "X" * 120),
    ],
)
def test_a_long_fact_is_broken_and_not_cut_off_at_the_edge(label, text):
    (pieces,) = drawn(msgspec.structs.replace(BASE, facts=[(label, text)]))
    lines = [piece for piece in pieces if piece.size == 9.5]
    assert "".join("".join(line.text for line in lines).split()) == "".join(text.split())
    assert len({line.y for line in lines}) > 1
    longest = max(len(line.text) for line in lines)
    assert longest <= 50, "75 mm hold no more characters of this size"


@pytest.mark.parametrize("num_rows", range(14, 19))
def test_totals_and_payment_are_not_torn_apart_by_the_end_of_a_page(num_rows):
    rows = [Row(f"model-{i} output", "tokens", "1", "2.000000", "3.000000") for i in range(num_rows)]
    doc = msgspec.structs.replace(BASE, customer=["Société d'Été"], rows=rows)
    pages = [{piece.text for piece in page} for page in drawn(doc)]
    for block in (BASE.totals, BASE.payment):
        holding = [page for page in pages if page & {label for label, _ in block}]
        assert len(holding) == 1, (num_rows, block)
