"""A document as PDF: drawn by fpdf2, A4, with the fonts that every reader has. Characters beyond Latin-1 become `?`."""

from __future__ import annotations

from datetime import UTC, datetime

from fpdf import FPDF, XPos, YPos
from fpdf.enums import TableBordersLayout, TextEmphasis
from fpdf.fonts import FontFace

from gateway.billing.document import Document

INK, SOFT, RULE, BLUE = (28, 35, 48), (93, 103, 120), (205, 211, 222), (47, 111, 219)
MARGIN_MM, WIDTH_MM, CHART_MM = 20, 170, 34
COLUMNS_MM = (88, 30, 24, 28)


class _Page(FPDF):
    def __init__(self, doc: Document) -> None:
        super().__init__(format="A4")
        self._doc = doc
        self.set_margin(MARGIN_MM)
        self.set_auto_page_break(True, margin=22)

    def footer(self) -> None:
        self.set_y(-15)
        self.set_font("helvetica", size=8)
        self.set_text_color(*SOFT)
        text = f"{self._doc.title} {self._doc.number}"
        self.cell(WIDTH_MM - 20, 5, _latin(text))
        self.cell(20, 5, f"{self.page_no()} / {{nb}}", align="R")


def render(doc: Document, created_at: int) -> bytes:
    page = _Page(doc)
    # The same invoice gives the same bytes.
    page.set_creation_date(datetime.fromtimestamp(created_at, UTC))
    page.set_title(_latin(f"{doc.title} {doc.number}"))
    page.add_page()
    _head(page, doc)
    if doc.bars:
        _chart(page, doc)
    _table(page, doc)
    _totals(page, doc)
    return bytes(page.output())


def _head(page: _Page, doc: Document) -> None:
    _line(page, f"{doc.title} {doc.number}", 20, style="B", height=9)
    _line(page, doc.issuer, 11)
    page.ln(6)
    top = page.get_y()
    local = [("", doc.local_period)] if doc.local_period else []
    for x, parts in (
        (MARGIN_MM, [("Customer", doc.customer), ("", doc.customer_id)]),
        (MARGIN_MM + 95, [("Period", doc.period), *local, ("Issued", doc.issued)]),
    ):
        page.set_y(top)
        for label, text in parts:
            if label:
                page.set_x(x)
                _line(page, label, 8, color=SOFT, height=4)
            page.set_x(x)
            _line(page, text, 10 if label else 8, color=INK if label else SOFT)
    page.set_y(max(page.get_y(), top + 22))


def _chart(page: _Page, doc: Document) -> None:
    _line(page, f"Charges by day (highest: {doc.highest} {doc.currency})", 8, color=SOFT)
    top = page.get_y() + 1
    step = WIDTH_MM / len(doc.bars)
    page.set_fill_color(*BLUE)
    page.set_draw_color(*RULE)
    for i, bar in enumerate(doc.bars):
        height = CHART_MM * bar.per_mille / 1000
        left = MARGIN_MM + i * step
        if height:
            page.rect(left + step * 0.12, top + CHART_MM - height, step * 0.76, height, style="F")
        page.set_font("helvetica", size=6)
        page.set_text_color(*SOFT)
        page.set_xy(left, top + CHART_MM + 0.8)
        page.cell(step, 3, str(bar.day), align="C")
    page.line(MARGIN_MM, top + CHART_MM, MARGIN_MM + WIDTH_MM, top + CHART_MM)
    page.set_xy(MARGIN_MM, top + CHART_MM + 9)


def _table(page: _Page, doc: Document) -> None:
    page.set_font("helvetica", size=9)
    page.set_text_color(*INK)
    page.set_draw_color(*RULE)
    page.set_fill_color(255, 255, 255)
    head = FontFace(emphasis=TextEmphasis.NONE, color=SOFT, size_pt=8)
    with page.table(
        col_widths=COLUMNS_MM,
        text_align=("LEFT", "RIGHT", "RIGHT", "RIGHT"),
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        headings_style=head,
        line_height=4.4,
        padding=(1.1, 0.8),
        width=WIDTH_MM,
    ) as table:
        table.row(["Item", "Tokens", "Per million", doc.currency])
        for row in doc.rows:
            text = f"{row.text}\n{row.detail}" if row.detail else row.text
            table.row([_latin(cell) for cell in (text, row.quantity, row.rate, row.amount)])
    page.ln(3)


def _totals(page: _Page, doc: Document) -> None:
    for label, amount in doc.totals:
        is_due = label == doc.totals[-1][0]
        page.set_font("helvetica", style="B" if is_due else "", size=11 if is_due else 9)
        page.set_text_color(*INK)
        page.cell(WIDTH_MM - 45, 6, label, align="R")
        page.cell(45, 6, _latin(f"{amount} {doc.currency}"), align="R", new_x=XPos.LMARGIN, new_y=YPos.NEXT)
    page.ln(4)
    _line(
        page,
        "Each request's charge is rounded once, half to even, to a millionth; a line is the sum of these charges.",
        7,
        color=SOFT,
    )


def _line(
    page: _Page, text: str, size: int, *, style: str = "", color: tuple[int, int, int] = INK, height: float = 5
) -> None:
    page.set_font("helvetica", style=style, size=size)
    page.set_text_color(*color)
    page.cell(0, height, _latin(text), new_x=XPos.LMARGIN, new_y=YPos.NEXT)


def _latin(text: str) -> str:
    return text.replace("\u2212", "-").encode("latin-1", "replace").decode("latin-1")
