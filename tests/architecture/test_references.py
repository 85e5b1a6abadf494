"""Every reference between code and pages leads somewhere: sections, decisions, rows of tables, ADRs, links, files, tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS, CHANGELOG = ROOT / "docs", ROOT / "CHANGELOG.md"
DESIGN, ADR = DOCS / "design", DOCS / "adr"
FOLDERS = ("accounting", "benchmarks", "cache", "docs", "gateway", "kernels", "migrations", "ops", "tests", "workers")
WORDS = {".py", ".md", ".lua", ".toml", ".txt", ".html", ".yaml", ""}
"""Suffixes of what may name a page; a Makefile has none."""

PAGE = re.compile(r"(?<![\w.-])(?:[\w.-]+/)*(?P<page>[a-z-]+)\.md\)?[,:]? +(?=sections? |decisions? |[A-Z]?\d)")
ITEM = re.compile(r"(?P<kind>sections? +|decisions? +)?(?P<name>\d+(?:\.\d+)*|[A-Z]\d{1,2}[a-c]?)(?![\w%])")
BETWEEN = re.compile(r",? +(?:and +|or +)?(?=sections? |decisions? |\d|[A-Z]\d)")
ADR_NUMBERS = re.compile(r"\bADRs? +(?P<numbers>\d+(?:,? +(?:and +|or +)?\d+)*)\b")
LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
QUOTED = re.compile(r"`(?P<text>[^`\n]+)`")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|lua|toml|txt|html|json|yaml|ini)")
FOLDER = re.compile(r"(?:[\w.-]+/)+")
MODULE = re.compile(r"(?:[\w.-]+/)*\w+\.(?:py|lua)")
OF_ANY_FOLDER = {"errors.py", "__init__.py"}
"""Names of modules that many folders have: a page may say what they are for."""
TEST = re.compile(r"test_\w+")
FENCE = re.compile(r"^ *```")


class Reference(NamedTuple):
    path: Path
    line_no: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line_no}: {self.text}"


@cache
def files() -> tuple[Path, ...]:
    """Of the root, and of every folder in it that is written by people."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    both = (path for path in (*ROOT.iterdir(), *inside) if path.name[0] != ".")
    return tuple(sorted(path for path in both if path.is_file()))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def lines_of(path: Path) -> list[str]:
    return text_of(path).splitlines()


def written() -> list[Path]:
    """Whatever may name a page: code, docs, README, CHANGELOG."""
    return [path for path in files() if path.suffix in WORDS and path != Path(__file__)]


def pages() -> list[Path]:
    return [path for path in files() if path.suffix == ".md" and path != CHANGELOG]


@cache
def flat_text_of(path: Path) -> str:
    """Returns the text on one line, comment signs left out, with every character in its place."""
    return re.sub(r"\n(?!\s*\n)[ #>]*", lambda end: " " * len(end[0]), text_of(path))


def found(pattern: re.Pattern[str], path: Path) -> Iterator[tuple[int, re.Match[str], str]]:
    """(line, match, the whole text on one line): a reference may go over a line's end, comment signs included."""
    text, flat = text_of(path), flat_text_of(path)
    for match in pattern.finditer(flat):
        yield (text.count("\n", 0, match.start("page" if "page" in match.groupdict() else 0)) + 1, match, flat)


@cache
def headings(page: str) -> frozenset[str]:
    """Numbers of the page's headings, of its decisions ("decision 5"), and the first cells of its tables' rows."""
    path = next((path for folder in (DESIGN, DOCS) if (path := folder / f"{page}.md").exists()), None)
    if path is None:
        return frozenset()
    names: set[str] = set()
    chapter = ""
    for line in lines_of(path):
        if heading := re.match(r"#{2,4} +(?P<rest>.+)", line):
            chapter = heading["rest"]
            if number := re.match(r"\d+(?:\.\d+)*(?=\.? )", chapter):
                names.add(number[0])
        elif "ecision" in chapter and (item := re.match(r"\| *(\d+) *\||(\d+)\. ", line)):
            names.add(f"decision {item[1] or item[2]}")
        elif row := re.match(r"\| *(?P<cell>[^|]+?) *\|", line):
            names.update(re.findall(r"\b[A-Z]\d{1,2}[a-c]?\b", row["cell"]))
    return frozenset(names)


@cache
def references_to_pages(path: Path) -> tuple[tuple[Reference, str, str], ...]:
    """(where, page, name): "api.md 6.2 and 6.3" are two."""
    return tuple(_references_to_pages(path))


def _references_to_pages(path: Path) -> Iterator[tuple[Reference, str, str]]:
    for line_no, match, text in found(PAGE, path):
        end, kind = match.end(), ""
        while item := ITEM.match(text, end):
            kind = "decision " if "decision" in (item["kind"] or kind) else "section "
            name = f"decision {item['name']}" if kind == "decision " else item["name"]
            shown = f"{match['page']}.md {kind if kind != 'section ' else ''}{item['name']}"
            yield Reference(path, line_no, shown), match["page"], name
            more = BETWEEN.match(text, item.end())
            if more is None:
                break
            end = more.end()


def no_broken(check: Callable[[Path], Iterator[Reference]], paths: list[Path]) -> None:
    """Fails with one line for each reference that leads nowhere."""
    if dead := [str(one) for path in paths for one in check(path)]:
        pytest.fail(f"{len(dead)} references lead nowhere:\n" + "\n".join(dead), pytrace=False)


def dead_sections(path: Path) -> Iterator[Reference]:
    for reference, page, name in references_to_pages(path):
        if name not in headings(page):
            yield reference


@cache
def known_adrs() -> frozenset[int]:
    return frozenset(int(one.name[:4]) for one in ADR.glob("[0-9][0-9][0-9][0-9]-*.md"))


def dead_adrs(path: Path) -> Iterator[Reference]:
    for line_no, match, _ in found(ADR_NUMBERS, path):
        for number in re.findall(r"\d+", match["numbers"]):
            if int(number) not in known_adrs():
                yield Reference(path, line_no, f"ADR {number}")


def outside_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a page that are not in a fenced block."""
    inside = False
    for line_no, line in enumerate(lines_of(path), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield line_no, line


def dead_links(path: Path) -> Iterator[Reference]:
    for line_no, line in outside_of_code(path):
        for match in LINK.finditer(line):
            target, _, anchor = match["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            there = (path.parent / target) if target else path
            if not there.exists() or (anchor and anchor not in anchors(there)):
                yield Reference(path, line_no, match["target"])


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = (re.match(r"#+ +(.+)", line) for _, line in outside_of_code(page))
    return {re.sub(r"[^\w -]", "", title[1].lower()).strip().replace(" ", "-") for title in titles if title}


def dead_files(path: Path) -> Iterator[Reference]:
    """Files in backticks, from the root of the repository. What begins with no folder of ours is somebody else's."""
    ours = {one.name for one in ROOT.iterdir() if one.is_dir() and one.name[0] != "."}
    for line_no, line in outside_of_code(path):
        for match in QUOTED.finditer(line):
            for name in match["text"].split():
                named = name.partition("::")[0].rstrip(",;:")
                looks_like_one = FILE.fullmatch(named) or FOLDER.fullmatch(named)
                if looks_like_one and named.split("/")[0] in ours and not (ROOT / named).exists():
                    yield Reference(path, line_no, name)


def short_names(path: Path) -> Iterator[Reference]:
    """Modules in backticks that are not named from the root of the repository."""
    for line_no, line in outside_of_code(path):
        for match in QUOTED.finditer(line):
            for name in match["text"].split():
                if MODULE.fullmatch(name) and name not in OF_ANY_FOLDER and not (ROOT / name).exists():
                    yield Reference(path, line_no, name)


@cache
def names_of_tests() -> tuple[str, ...]:
    names: set[str] = set()
    for path in files():
        if path.suffix == ".py" and path.is_relative_to(ROOT / "tests"):
            names.update(re.findall(r"def (test_\w+)", "\n".join(lines_of(path))))
            names.add(path.stem)
    return tuple(sorted(names))


def dead_tests(path: Path) -> Iterator[Reference]:
    """A test in backticks is the name of one, or how the names of some begin."""
    for line_no, line in outside_of_code(path):
        for match in QUOTED.finditer(line):
            text = match["text"]
            if TEST.fullmatch(text) and not any(name.startswith(text) for name in names_of_tests()):
                yield Reference(path, line_no, text)


def test_the_pages_and_their_references_were_read():
    numbers = [name for path in written() for _, _, name in references_to_pages(path)]
    adrs = [match for path in written() for match in found(ADR_NUMBERS, path)]
    links = [line for path in pages() for _, line in outside_of_code(path) if LINK.search(line)]
    assert len(numbers) > 30 and len(adrs) > 30 and len(links) > 30
    assert {"1.1", "decision 5"} <= headings("architecture") | headings("api")
    assert "F27" in headings("security") and len(names_of_tests()) > 1000


def test_every_section_and_decision_that_is_named_is_there():
    no_broken(dead_sections, written())


def test_every_adr_that_is_named_is_there():
    no_broken(dead_adrs, written())


def test_every_relative_link_leads_somewhere():
    no_broken(dead_links, pages())


def test_every_file_that_a_page_names_is_there():
    no_broken(dead_files, pages())


def test_every_module_is_named_by_its_full_path():
    """On manuals and design pages; an ADR may name what there was."""
    no_broken(short_names, [path for path in pages() if path.parent in (DOCS, DESIGN)])


def test_every_test_that_a_page_names_is_there():
    no_broken(dead_tests, pages())
