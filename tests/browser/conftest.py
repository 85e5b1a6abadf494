"""A real browser on a real Headgate. `make test-browser` installs what it needs beside Debian's Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("HEADGATE_TEST_CHROMIUM") or shutil.which("chromium")
SHOTS = Path(os.environ.get("HEADGATE_TEST_SCREENSHOTS") or ".headgate-screenshots")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: `apt-get install chromium`, then `make test-browser`")
    playwright = pytest.importorskip("playwright.sync_api", reason="`make test-browser` installs playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()
