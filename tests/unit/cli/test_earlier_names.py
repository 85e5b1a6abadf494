"""A command has one name in lists, and goes on under the name that it had before."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from gateway.cli.main import main


@pytest.mark.parametrize("verb", ["remove", "delete"])
def test_a_prefix_is_removed_by_either_word(verb, monkeypatch):
    called: list[str] = []

    def call(self, method, path, *more, **other):
        called.append(f"{method} {path}")
        return {"id": "prefix_1"}

    monkeypatch.setattr("gateway.cli.api.AdminApi.call", call)
    done = CliRunner().invoke(main, ["prefixes", verb, "prefix_1"])
    assert (done.exit_code, done.output, called) == (0, "prefix_1\n", ["DELETE /admin/v1/prefixes/prefix_1"])


def test_help_lists_the_word_that_every_group_has():
    shown = CliRunner().invoke(main, ["prefixes", "--help"]).output
    assert "  remove " in shown
    assert "delete" not in shown
