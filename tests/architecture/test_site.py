"""The documentation's navigation has every page, and the pages that are made from code are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app import api_routes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXT = (ROOT / "mkdocs.yml").read_text()
LATER = {"cli.md", "clients.md", "upstreams.md"}
"""Pages that the navigation names and that may not be written yet."""
OF_AN_INDEX = {"adr"}
"""Folders whose pages their own README lists (tests/architecture/test_adr_index.py)."""


def entries(nav: list[Any]) -> list[str]:
    found: list[str] = []
    for entry in nav:
        ((_, target),) = entry.items()
        found += entries(target) if isinstance(target, list) else [target]
    return found


def nav() -> list[str]:
    return entries(yaml.safe_load(TEXT[TEXT.index("\nnav:") :])["nav"])


def test_every_page_is_in_the_navigation_once():
    named = nav()
    assert len(named) == len(set(named))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages = {page for page in pages if page.partition("/")[0] not in OF_AN_INDEX or page.endswith("README.md")}
    assert pages - set(named) == set(), "mkdocs.yml lacks these pages"


def test_the_navigation_names_no_page_that_nobody_writes():
    missing = {page for page in nav() if not (DOCS / page).exists()}
    assert missing <= LATER


def script(name):
    """A module of `ops/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "ops" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_errors_is_current():
    errors = script("errors")
    text = errors.PAGE.read_text()
    assert text == errors.page(text), "errors changed: run `make errors`"
    codes = {one.code for one in errors.errors()}
    assert {"invalid_api_key", "rate_limit_exceeded", "insufficient_quota", "no_worker", "unknown_url"} <= codes


def test_the_page_of_endpoints_is_current():
    reference = script("api_reference")
    text = reference.PAGE.read_text()
    assert text == reference.page(text), "endpoints changed: run `make api-reference`"
    named = {(method, path) for method, path in re.findall(r"^\| `([A-Z]+) (/\S*)` \|", text, re.M)}
    served = {(route.method, re.sub(r":[^{}]*}", "}", route.path)) for route in api_routes()}
    assert named == served
    with pytest.raises(ValueError, match="no area"):
        reference.area("/v3/nothing")


def test_every_code_of_the_design_is_on_the_page_of_errors():
    section = re.search(r"^\| status \|.*?\n\n", (DOCS / "design" / "api.md").read_text(), re.M | re.S)
    assert section is not None
    written = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", section[0])) - {"invalid_request_error", "server_error"}
    page = (DOCS / "errors.md").read_text()
    assert {code for code in written if f"`{code}`" not in page} == set()


def test_the_page_of_health_says_what_every_503_means():
    codes = set(re.findall(r"^\| 503 \| `(\w+)`", (DOCS / "errors.md").read_text(), re.M))
    assert "no_worker" in codes
    health = (DOCS / "health.md").read_text()
    assert {code for code in codes if f"`{code}`" not in health} == set()
