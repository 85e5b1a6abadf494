"""A split that computes something else is refused at load, by numbers."""

from __future__ import annotations

import pytest

from workers.engine.parallel.group import Member
from workers.engine.values.errors import ModelError


@pytest.mark.rest
def test_a_split_whose_logits_differ_from_the_whole_models_is_refused(pair, tiny_model, monkeypatch):
    """Rank 0 goes on with its own part alone."""
    true_sum = Member.sum

    def forgetful(self, x):
        true_sum(self, x.clone())
        return x

    monkeypatch.setattr(Member, "sum", forgetful)
    with pytest.raises(ModelError, match="paged KV and 2 ranks differ"):
        pair.runner(tiny_model("qwen2"))
