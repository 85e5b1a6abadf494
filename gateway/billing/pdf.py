"""A document as PDF/A-3: drawn by fpdf2, A4, with every glyph embedded. It carries the XML of an electronic invoice, as
Factur-X describes it.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any

from fpdf import FPDF, XPos, YPos
from fpdf.enums import TableBordersLayout, TextEmphasis, TextMode
from fpdf.fonts import FontFace

from gateway.billing import fonts
from gateway.billing.document import Document, Row
from gateway.billing.fonts import FAMILY

INK, SOFT, RULE, BLUE = (28, 35, 48), (93, 103, 120), (205, 211, 222), (47, 111, 219)
MARGIN_MM, WIDTH_MM, CHART_MM, LOGO_MM = 20, 170, 34, 22
FACTS_MM = MARGIN_MM + 95
COLUMNS_MM = (88, 30, 24, 28)
TOTAL_MM, PAYMENT_MM = 6, 5
BOLD_MM = 0.12
PRODUCER = "fpdf2"
XML_NAME = "factur-x.xml"
FACTUR_X = "urn:factur-x:pdfa:CrossIndustryDocument:invoice:1p0#"


class _Page(FPDF):
    def __init__(self, doc: Document) -> None:
        super().__init__(format="A4", enforce_compliance="PDF/A-3B")
        self._doc = doc
        self.set_margin(MARGIN_MM)
        self.set_auto_page_break(True, margin=22)
        fonts.choose(self, doc.texts(), doc.country)

    def footer(self) -> None:
        self.set_y(-15)
        self.set_font(FAMILY, size=8)
        self.set_text_color(*SOFT)
        self.cell(WIDTH_MM, 5, f"{self._doc.title} {self._doc.number}, page {self.page_no()} of {{nb}}")

    def _render_styled_text_line(self, *args: Any, **kwargs: Any) -> bool:
        """A line that begins with a fallback font sets its font in a state of its own, and fpdf2 takes it for set on the
        page. The next line would have the size of an earlier text.
        """
        is_on_next_page: bool = super()._render_styled_text_line(*args, **kwargs)
        self.current_font_is_set_on_page = False
        return is_on_next_page

    def keep_together(self, height: float) -> None:
        if self.will_page_break(height):
            self.add_page()

    def drawn(self, text: str) -> str:
        return fonts.drawable(text, self._doc.country)


def render(doc: Document, created_at: int, logo: bytes | None = None, xml: bytes | None = None) -> bytes:
    page = _Page(doc)
    # The same invoice gives the same bytes.
    made_at = datetime.fromtimestamp(created_at, UTC)
    page.set_creation_date(made_at)
    page.set_title(f"{doc.title} {doc.number}")
    page.set_lang("en")
    page.add_page()
    if logo is not None:
        page.image(io.BytesIO(logo), x=MARGIN_MM + WIDTH_MM - 60, y=MARGIN_MM, w=60, h=LOGO_MM, keep_aspect_ratio=True)
    _head(page, doc)
    if doc.bars:
        _chart(page, doc)
    _table(page, doc)
    _totals(page, doc)
    if doc.credits:
        _credits(page, doc)
    _closing(page, doc)
    if xml is not None:
        _attach(page, doc, xml, made_at)
    return bytes(page.output())


def _head(page: _Page, doc: Document) -> None:
    _line(page, f"{doc.title} {doc.number}", 20, is_bold=True, height=9)
    _block(page, doc.issuer, MARGIN_MM, WIDTH_MM - 65)
    page.ln(6)
    top = page.get_y()
    _line(page, "Customer", 8, color=SOFT, height=4.4)
    _block(page, doc.customer, MARGIN_MM, 90)
    bottom = page.get_y()
    page.set_y(top)
    for label, text in doc.facts:
        page.set_x(FACTS_MM)
        _line(page, label, 8, color=SOFT, height=4.4)
        page.set_x(FACTS_MM)
        page.set_font(FAMILY, size=9.5)
        page.set_text_color(*INK)
        page.multi_cell(0, 4.4, page.drawn(text), align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)
        page.ln(0.8)
    page.set_y(max(page.get_y(), bottom, top + 22) + 3)


def _block(page: _Page, lines: list[str], x: float, width: float) -> None:
    """Draws a name and what stands below it. A long line is broken."""
    for number, text in enumerate(lines):
        page.set_x(x)
        page.set_font(FAMILY, size=8 if number else 11)
        page.set_text_color(*(SOFT if number else INK))
        with _weight(page, is_bold=number == 0):
            height = 4.2 if number else 5.4
            page.multi_cell(width, height, page.drawn(text), align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)


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
        page.set_font(FAMILY, size=6)
        page.set_text_color(*SOFT)
        page.set_xy(left, top + CHART_MM + 0.8)
        page.cell(step, 3, str(bar.day), align="C")
    page.line(MARGIN_MM, top + CHART_MM, MARGIN_MM + WIDTH_MM, top + CHART_MM)
    page.set_xy(MARGIN_MM, top + CHART_MM + 9)


def _table(page: _Page, doc: Document) -> None:
    with _lines(page, COLUMNS_MM) as table:
        table.row(["Item", "Tokens", "Per million", f"Amount ({doc.currency})"])
        for row in doc.rows:
            cells = (_title(row), row.quantity, row.rate, row.amount)
            table.row([page.drawn(cell) for cell in cells])
    page.ln(3)


def _credits(page: _Page, doc: Document) -> None:
    page.ln(3)
    page.keep_together(30)  # a heading does not stand alone
    _line(page, "Prepaid credits that were used", 9, is_bold=True)
    with _lines(page, (WIDTH_MM - 40, 40)) as table:
        table.row(["Credit", f"Amount ({doc.currency})"])
        for row in doc.credits:
            table.row([page.drawn(cell) for cell in (_title(row), row.amount)])


def _lines(page: _Page, widths: tuple[float, ...]) -> Any:
    """Returns a table: text on the left, numbers on the right."""
    page.set_font(FAMILY, size=9)
    page.set_text_color(*INK)
    page.set_draw_color(*RULE)
    page.set_fill_color(255, 255, 255)
    return page.table(
        col_widths=widths,
        text_align=("LEFT", *("RIGHT" for _ in widths[1:])),
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        headings_style=FontFace(emphasis=TextEmphasis.NONE, color=SOFT, size_pt=8),
        line_height=4.4,
        padding=(1.1, page.c_margin),
        width=WIDTH_MM,
    )


def _title(row: Row) -> str:
    return f"{row.text}\n{row.detail}" if row.detail else row.text


def _totals(page: _Page, doc: Document) -> None:
    page.keep_together(TOTAL_MM * len(doc.totals) + 2)
    for number, (label, amount) in enumerate(doc.totals, 1):
        is_due = number == len(doc.totals)
        if is_due:
            page.ln(1)
            page.set_draw_color(*RULE)
            page.line(MARGIN_MM + WIDTH_MM - 110, page.get_y(), MARGIN_MM + WIDTH_MM, page.get_y())
            page.ln(1)
        page.set_font(FAMILY, size=11 if is_due else 9)
        page.set_text_color(*INK)
        with _weight(page, is_due):
            page.cell(WIDTH_MM - 55, TOTAL_MM, label, align="R")
            page.cell(55, TOTAL_MM, amount, align="R", new_x=XPos.LMARGIN, new_y=YPos.NEXT)


def _closing(page: _Page, doc: Document) -> None:
    if doc.payment:
        page.ln(3)
        page.keep_together(PAYMENT_MM * len(doc.payment))
        for label, text in doc.payment:
            page.set_font(FAMILY, size=9)
            page.set_text_color(*SOFT)
            page.cell(28, PAYMENT_MM, label)
            page.set_text_color(*INK)
            page.multi_cell(WIDTH_MM - 28, PAYMENT_MM, page.drawn(text), align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)
    page.ln(4)
    for note in doc.notes:
        page.set_font(FAMILY, size=7)
        page.set_text_color(*SOFT)
        page.multi_cell(WIDTH_MM, 4, page.drawn(note), align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)


def _attach(page: _Page, doc: Document, xml: bytes, made_at: datetime) -> None:
    from facturx.facturx import generate_xmp_object
    from lxml import etree

    page.embed_file(
        bytes=xml,
        basename=XML_NAME,
        modification_date=made_at,
        mime_type="text/xml",
        associated_file_relationship="Alternative",
        desc="The invoice as data (EN 16931)",
    )
    xmp = generate_xmp_object(
        {
            "pdfa3_flavor": "B",
            "title": f"{doc.title} {doc.number}",
            "author": doc.issuer[0],
            "subject": f"{doc.title} {doc.number}",
            "producer": PRODUCER,
            "creator_tool": "Headgate",
            "timestamp": made_at.isoformat(timespec="seconds"),
            "documenttype": "INVOICE",
            "xml_filename": XML_NAME,
            "version": "1.0",
            "xmp_level": "EN 16931",
            "urn": FACTUR_X,
        }
    )
    page.set_author(doc.issuer[0])
    page.set_subject(f"{doc.title} {doc.number}")
    page.set_creator("Headgate")
    page.set_producer(PRODUCER)
    page.set_xmp_metadata(etree.tostring(xmp, encoding="unicode"))


def _line(
    page: _Page, text: str, size: float, *, is_bold: bool = False, color: tuple[int, int, int] = INK, height: float = 5
) -> None:
    page.set_font(FAMILY, size=size)
    page.set_text_color(*color)
    with _weight(page, is_bold):
        page.cell(0, height, page.drawn(text), new_x=XPos.LMARGIN, new_y=YPos.NEXT)


def _weight(page: _Page, is_bold: bool) -> AbstractContextManager[Any]:
    """Bold glyphs get a thin outline: to make the bold font of a variable one takes two seconds."""
    if not is_bold:
        return nullcontext()
    page.set_draw_color(*INK)
    return page.local_context(text_mode=TextMode.FILL_STROKE, line_width=BOLD_MM)
