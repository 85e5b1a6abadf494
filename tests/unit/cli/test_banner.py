from __future__ import annotations

import json
import shlex
from pathlib import Path

from accounting.lifecycle.bootstrap import EXAMPLE_RATES, FREE
from accounting.prices.price_lists import PricedModel, SheetVersion
from accounting.values.tenant_types import Credentials
from accounting.values.types import Rates, Tier
from gateway.cli.banner import banner
from gateway.cli.first_prices import price_notes

FRESH = Credentials("hg_admin_a", "proj_t", "hg_live_k", fresh=True)
LATER = Credentials("hg_admin_a", "proj_t", "hg_live_k")


def curl_of(text: str) -> list[str]:
    start, end = text.index("curl"), text.index("from openai")
    return shlex.split(text[start:end].removesuffix("import os\n").rstrip().removesuffix("import os"))


def snippet_of(text: str) -> str:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "import" in line)
    return "\n".join(line[2:] for line in lines[first : lines.index("Ctrl-C drains and stops; nothing is lost.")])


def test_the_first_start_shows_both_keys_and_commands_that_work_as_printed():
    text = banner("http://127.0.0.1:8080", ["m", "n"], FRESH, Path("/h"))
    arguments = curl_of(text)
    assert "http://127.0.0.1:8080/v1/chat/completions" in arguments
    assert "Authorization: Bearer hg_live_k" in arguments
    assert json.loads(arguments[-1])["model"] == "m"
    compile(snippet_of(text), "snippet", "exec")
    assert "hg_admin_a" in text
    assert "  model       m\n  model       n\n" in text


def test_later_starts_show_no_key():
    text = banner("http://127.0.0.1:8080", ["m", "n"], LATER, Path("/h"))
    assert "hg_live_k" not in text
    assert "hg_admin_a" not in text
    assert json.loads(curl_of(text)[-1])["stream"] is True
    compile(snippet_of(text), "snippet", "exec")


def version(**rates: dict[Tier, Rates]) -> SheetVersion:
    priced = [PricedModel(model, tier, one) for model, tiers in rates.items() for tier, one in tiers.items()]
    return SheetVersion("standard", 1, "USD", 0, None, 0, priced, [])


def test_a_start_says_which_models_are_free_and_which_are_refused():
    sheet = version(demo=EXAMPLE_RATES, big=FREE, old=EXAMPLE_RATES)
    assert price_notes(["demo"], sheet) == []
    notes = price_notes(["demo", "big", "left-out"], sheet)
    assert notes == [
        "big is free: its price on the sheet standard is 0 (headgate prices add).",
        "left-out has no price on the sheet standard: requests for it are refused (headgate prices add).",
    ]
    text = banner("http://127.0.0.1:8080", ["demo", "big", "left-out"], FRESH, Path("/h"), notes)
    assert f"  model       left-out\n  price       {notes[0]}\n  price       {notes[1]}\n" in text
    assert price_notes(["m"], None)[0].startswith("m has no price")


def test_a_model_that_costs_something_as_a_chat_or_in_a_batch_is_not_free():
    assert price_notes(["m"], version(m={**EXAMPLE_RATES, "batch": Rates(0, 0, 0, 0)})) == []
    assert price_notes(["m"], version(m={**FREE, "batch": Rates(0, 0, 0, 1)})) == []
