"""Logprobs of a prompt travel in parts that are each decoded in little time."""

import gc

import msgspec
import pytest

from workers.protocol.messages import TokenLogprob, TopLogprob
from workers.protocol.prompt_logprobs import PART_ENTRIES, pack, unpack


@pytest.mark.parametrize("num_top", [0, 5, 2 * PART_ENTRIES])
@pytest.mark.parametrize("num_tokens", [0, 1, PART_ENTRIES, 2 * PART_ENTRIES + 3])
def test_parts_are_small_and_join_to_what_was_packed(num_tokens: int, num_top: int) -> None:
    num_tokens = min(num_tokens, 50) if num_top > PART_ENTRIES else num_tokens
    top = tuple(TopLogprob(token, -1.5) for token in range(num_top))
    logprobs = [TokenLogprob(-float(token), top) if token else None for token in range(num_tokens)]
    parts = [*unpack(pack(logprobs))]
    assert [one for part in parts for one in part] == logprobs
    assert all(len(part) == 1 or len(part) * (1 + num_top) <= PART_ENTRIES for part in parts)


def test_a_part_that_is_not_msgpack_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        list(unpack([b"\xc1"]))


def test_logprobs_do_not_count_for_the_collector() -> None:
    """Each count of 700 begins a collection, and a prompt has 200,000 of them."""
    logprob = msgspec.msgpack.decode(
        msgspec.msgpack.encode(TokenLogprob(-1.0, (TopLogprob(1, -1.0),))), type=TokenLogprob
    )
    assert not gc.is_tracked(logprob) and not gc.is_tracked(logprob.top[0])
