"""O7: one spelling of money on the command line: decimal amounts of the currency, read exactly."""

from __future__ import annotations

import re
from decimal import Decimal

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gateway.cli.main import main
from gateway.cli.money import Amount, bill, cost, shown
from gateway.schema.money import MAX_AMOUNT, decimal, micro_units


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("25", 25_000_000),
        ("25.00", 25_000_000),
        ("0.000025", 25),
        ("0", 0),
        ("999", 999_000_000),
        ("1000.0", 1_000_000_000),
        ("-5.5", -5_500_000),
        ("0.29", 290_000),
        ("9007199254.740991", MAX_AMOUNT),
        ("00.10", 100_000),
    ],
)
def test_o7_an_amount_is_read_exactly(text, amount):
    assert micro_units(text) == amount


@given(st.integers(-MAX_AMOUNT, MAX_AMOUNT))
def test_o7_what_is_printed_can_be_typed(amount):
    assert micro_units(decimal(amount, 2)) == amount
    assert Decimal(decimal(amount)) * 10**6 == amount


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("25,00", "like 25.00"),
        ("1,000.00", "like 25.00"),
        ("$25", "like 25.00"),
        ("1e3", "like 25.00"),
        ("NaN", "like 25.00"),
        ("", "like 25.00"),
        (" 5", "like 25.00"),
        ("\u0665", "like 25.00"),
        (".5", "like 25.00"),
        ("5.", "like 25.00"),
        ("0.0000001", "6 decimals"),
        ("9007199254.740992", "at most 9007199254.740991"),
    ],
)
def test_o7_what_is_no_amount_says_how_one_is_written(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        micro_units(text)


def test_o7_micro_units_of_old_scripts_are_not_taken_for_the_currency():
    with pytest.raises(ValueError, match=re.escape("25000000.00")) as refused:
        micro_units("25000000")
    assert "25.00 if you mean micro-units" in str(refused.value)


def test_o7_an_amount_has_bounds_and_places_of_its_own():
    cents = Amount(places=2)
    assert cents.convert("25.10", None, None) == 25_100_000
    with pytest.raises(click.BadParameter, match="2 decimals"):
        cents.convert("25.105", None, None)
    for text in ("-1", "-0.01"):
        with pytest.raises(click.BadParameter, match="negative"):
            cents.convert(text, None, None)
    with pytest.raises(click.BadParameter, match="above 0"):
        Amount(positive=True).convert("0", None, None)
    assert Amount(signed=True).convert("-1.5", None, None) == -1_500_000


def test_o7_tables_show_the_currency():
    assert shown(25_000_000, "usd") == "25.00 USD"
    assert shown(-25, "EUR") == "-0.000025 EUR"
    assert shown(None, "EUR") == ""
    assert [cost(0, "usd"), cost(140, "USD"), cost(None, None)] == ["0.000000 USD", "0.000140 USD", ""]
    assert [bill(0, "USD"), bill(25_000_000, "JPY"), bill(1_500_000, "KWD")] == ["0.00 USD", "25 JPY", "1.500 KWD"]


@pytest.mark.parametrize(
    "command",
    [
        ("budgets", "add", "t", "--period", "month", "--limit"),
        ("budgets", "set", "budget_1", "--limit"),
        ("budgets", "adjust", "--to", "2099-01-01", "budget_1"),
        ("credits", "grant", "t"),
        ("credits", "correct", "t", "req_1"),
        ("limits", "spend", "t", "--limit"),
        ("prices", "add", "gold", "--rate"),
        ("prices", "add", "gold", "--batch-rate"),
    ],
)
def test_o7_every_command_that_takes_money_takes_it_in_that_spelling(command, tmp_path):
    prefix = "m=1.00,1.00,1.00," if command[0] == "prices" else ""
    for text, said in (
        ("25000000", "25.00 if you mean micro-units"),
        ("25,00" if not prefix else "25:00", "25.00"),
        ("0.0000001", "decimals"),
    ):
        done = CliRunner().invoke(main, [*command, prefix + text, "--home", str(tmp_path)])
        assert done.exit_code == 2, (text, done.output)
        assert said in " ".join(done.output.split()), (text, done.output)
    done = CliRunner().invoke(main, [*command, f"{prefix}25.00", "--home", str(tmp_path)])
    assert "There is no home in" in done.output  # understood, and nobody to send it to
