"""A command's input may be a device that never ends, or no text."""

from __future__ import annotations

import io
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gateway.cli import input_files
from gateway.cli.main import main


def test_a_file_of_the_largest_size_is_read_and_one_more_byte_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "MAX_READ", 2**20)
    path = tmp_path / "text"
    path.write_text("a" * 2**20)
    with path.open() as file:
        assert len(input_files.text_of(file, "--file")) == 2**20
    path.write_text("a" * (2**20 + 1))
    with path.open() as file, pytest.raises(click.UsageError, match="--file is larger than 1 MiB"):
        input_files.text_of(file, "--file")


@pytest.mark.parametrize(
    "command",
    [
        ["prefixes", "add", "model", "--system-file", "/dev/zero"],
        ["prices", "add", "standard", "--file", "/dev/zero"],
        ["upstreams", "costs", "openai", "/dev/zero"],
    ],
)
def test_a_device_that_never_ends_is_refused(command: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*command, "--home", str(tmp_path)])
    assert (result.exit_code, "is larger than 32 MiB" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("command", "content", "said"),
    [
        (
            ["upstreams", "add", "u", "http://127.0.0.1:9/v1", "--model", "m", "--key-file"],
            b"\n",
            "--key-file is empty",
        ),
        (["batches", "submit"], b"", "FILE is empty"),
        (["prefixes", "add", "model", "--system-file"], b"\xff\xfe", "--system-file is not UTF-8 text"),
    ],
)
def test_an_input_that_says_nothing_is_refused(command: list[str], content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_bytes(content)
    result = CliRunner().invoke(main, [*command, str(file), "--home", str(tmp_path)])
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_a_model_is_named_once(tmp_path: Path) -> None:
    add = ["upstreams", "add", "u", "http://127.0.0.1:9/v1", "--model", "m=a", "--model", "m=b"]
    result = CliRunner().invoke(main, [*add, "--home", str(tmp_path)])
    assert (result.exit_code, "--model names m twice" in result.output) == (2, True), result.output


@pytest.mark.parametrize("switch", [("--costs-project", "p"), ("--costs-url", "http://127.0.0.1:9"), ("--costs",)])
def test_costs_are_not_read_without_the_credential_for_them(switch: tuple[str, ...], tmp_path: Path) -> None:
    add = ["upstreams", "add", "u", "http://127.0.0.1:9/v1", "--model", "m", *switch, "--home", str(tmp_path)]
    result = CliRunner().invoke(main, add, terminal_width=200)
    said = f"{switch[0]} needs the credential for the cost API: give --costs-key-variable or --costs-key-file."
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_bytes_that_standard_input_lets_through_are_no_text() -> None:
    with pytest.raises(click.UsageError, match="Standard input is not UTF-8 text"):
        input_files.text_of(io.StringIO("\udcff\udcfe"), "Standard input")
