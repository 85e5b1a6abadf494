"""Beginnings of prompts are counted in bounded memory, and the most used ones are kept."""

from gateway.routing import prefix_uses
from gateway.routing.prefix_uses import PrefixUses


def test_the_most_used_beginnings_outlive_any_number_of_rare_ones(monkeypatch):
    monkeypatch.setattr(prefix_uses, "MOST", 4)
    uses = PrefixUses()
    for number in range(100):
        for name, cached in ((b"often", 64), (b"rare %d" % number, 0)):
            uses.note(name, "m", 100, cached, is_public=False)
    (name, use), *others = uses.top(50)
    assert name == b"often".hex()
    assert (use.num_requests, use.num_prompt_tokens, use.num_cached_tokens) == (100, 10_000, 6_400)
    assert len(others) < 8
