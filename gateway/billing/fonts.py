"""The fonts of a PDF: those that a text needs, of the Noto fonts that two packages bring. The PDF has only the glyphs
that are used, so that a document with a Chinese name has some 20 kB more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import manimgx_fonts
import noto_cjk_sans_otc
from fontTools.ttLib import TTFont
from fpdf import FPDF

FAMILY = "noto"
LATIN = "NotoSans[wght].ttf"
_SCRIPTS = Path(manimgx_fonts.__file__).parent
_CJK = Path(noto_cjk_sans_otc.__file__).parent / "NotoSansCJK-Regular.ttc"
FACES = {"JP": 0, "KR": 1, "TW": 3, "HK": 4}
SIMPLIFIED = 2
"""The face of the collection that Chinese readers expect unless their country says otherwise."""
_EVERYWHERE = frozenset("\n\u200c\u200d")


def choose(page: FPDF, text: str, country: str) -> None:
    """Loads the fonts that the text needs, and sets those other than the Latin one as fallbacks."""
    page.add_font(FAMILY, "", _SCRIPTS / LATIN)
    missing = set(text) - _EVERYWHERE - _covered(_SCRIPTS / LATIN, 0)
    fallbacks: list[str] = []
    for path, face in _others(country):
        if not missing:
            break
        if missing & _covered(path, face):
            missing -= _covered(path, face)
            name = f"noto{len(fallbacks)}"
            page.add_font(name, "", path, collection_font_number=face)
            fallbacks.append(name)
    page.set_fallback_fonts(fallbacks, exact_match=False)
    page.set_text_shaping(True)


def drawable(text: str, country: str) -> str:
    """Returns the text with `<U+1234>` for what no font can draw. It never becomes question marks."""
    known = _covered(_SCRIPTS / LATIN, 0) | _EVERYWHERE
    rest = set(text) - known
    for path, face in _others(country):
        if not rest:
            return text
        rest -= _covered(path, face)
    return "".join(f"<U+{ord(char):04X}>" if char in rest else char for char in text)


def _others(country: str) -> Iterator[tuple[Path, int]]:
    for path in sorted(_SCRIPTS.glob("*.ttf")):
        if path.name != LATIN and "Italic" not in path.name:
            yield path, 0
    yield _CJK, FACES.get(country, SIMPLIFIED)


@cache
def _covered(path: Path, face: int) -> frozenset[str]:
    with TTFont(path, lazy=True, fontNumber=face) as font:
        return frozenset(chr(code) for code in font.getBestCmap())
