"""A command's input may be a device that never ends, or no text."""

from __future__ import annotations

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
