"""Bad words and allowed tokens: what is banned behind which output, and that the engine asks for it at every draw."""

from __future__ import annotations

import random

import pytest
from engine_driver import LINK, Driver
from fakes import EOS, VOCAB_SIZE, ScriptedRunner, allowed, encode, generate_request, script
from proposing import Informed, InformedTree, speculating

from workers.engine.sequences.bans import Bans, bans_of
from workers.engine.values.plan import SampleSpec
from workers.engine.values.sampling_params import choice_seed
from workers.protocol.messages import Failed, SamplingParams

PROMPT = encode("a prompt that all of them share")
A, B, C = b"abc"
PAIRS = tuple((first, second) for first in b"abcdefgh" for second in b"efghijklm ")


def bans(vocab_size=VOCAB_SIZE, **params):
    return Bans(SamplingParams(seed=0, **params), (EOS,), vocab_size)


def test_a_word_of_one_token_is_banned_everywhere():
    one = bans(bad_words=((A,), (C,), (A,)))
    assert list(one.behind(())) == list(one.behind([A, B])) == [A, C]
    assert (one.mask, one.needs_last) == (None, False)


def test_of_a_longer_word_the_last_token_is_banned_behind_the_others():
    one = bans(bad_words=((A, B, C), (B, A), (C,)))
    assert one.needs_last
    assert list(one.behind([])) == [C]
    assert list(one.behind([A])) == [C], "only a part of the word"
    assert list(one.behind([A, B])) == [A, C], "of both words that end here"
    assert list(one.behind([B, B])) == [A, C]
    assert list(one.behind([A, B, A])) == [C]


class _Sliced(list):
    """An output that counts how often a part of it is copied."""

    num_slices = 0

    def __getitem__(self, key):
        self.num_slices += isinstance(key, slice)
        return super().__getitem__(key)


def test_an_output_is_looked_at_once_however_many_words_may_end_there():
    words = tuple((A,) * length + (last,) for length in range(1, 200) for last in (B, C, length % 90))
    one, output = bans(bad_words=words), _Sliced([A] * 150)
    banned = one.behind(output)
    assert output.num_slices <= 1
    assert list(banned) == sorted({B, C, *(length % 90 for length in range(1, 151))})
    assert one.behind([A] * 300) is one.behind([A] * 301), "the same list for the same end"


@pytest.mark.parametrize("seed", range(30))
def test_bans_are_those_of_each_word_by_itself(seed):
    source = random.Random(seed)
    words = tuple(
        tuple(source.choices(b"abc", k=source.choice((2, 2, 3, 4, 5, 7)))) for _ in range(source.choice((3, 40)))
    )
    one = bans(bad_words=words)
    for _ in range(200):
        output = source.choices(b"abc", k=source.randrange(12))
        expected = {
            word[-1] for word in words if len(word) <= len(output) + 1 and output[1 - len(word) :] == [*word[:-1]]
        }
        assert list(one.behind(output)) == sorted(expected)


def test_the_prompt_is_no_beginning_of_a_word():
    drive = Driver(ScriptedRunner(block_size=4))
    word = (PROMPT[-1], script(PROMPT, SampleSpec(SamplingParams(0, 0.0), 0, len(PROMPT), PROMPT, ())))
    drive.send(generate_request("r", PROMPT, 1, sampling=SamplingParams(0, 0.0, bad_words=(word,))))
    drive.run()
    assert drive.tokens[LINK, "r", 0] == [word[1]]


def test_only_allowed_tokens_are_in_the_mask_and_ends_are_tokens_like_others():
    mask = bans(allowed_token_ids=(C, A, A)).mask
    assert mask is not None
    assert len(mask) == (VOCAB_SIZE + 31) // 32 * 4, "whole words, as the op wants them"
    assert int.from_bytes(mask, "little") == 1 << A | 1 << C


def test_longer_words_give_way_where_they_would_leave_nothing():
    one = bans(bad_words=((A, A), (A, C), (B,)), allowed_token_ids=(A, B, C))
    assert list(one.behind([C])) == [B]
    assert list(one.behind([A])) == [B], "else nothing could follow"
    end = bans(bad_words=((A, A),), allowed_token_ids=(A, EOS), min_tokens=2)
    assert list(end.behind([A])) == [], "the end may not come yet"
    assert list(end.behind([A, A])) == [A]


def test_bans_of_everything_are_no_bans():
    for params in (
        {"bad_words": ((A,), (B,)), "allowed_token_ids": (A, B)},
        {"allowed_token_ids": (EOS,), "min_tokens": 1},
        {"allowed_token_ids": (A,), "min_tokens": 1, "stop_token_ids": (A,)},
    ):
        with pytest.raises(ValueError, match="nothing"):
            bans(**params)
    with pytest.raises(ValueError, match="nothing"):
        bans(3, bad_words=((0,), (1,), (2,)))
    assert bans_of(SamplingParams(seed=0), (EOS,), VOCAB_SIZE) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": ((A,), ())},
        {"bad_words": ((A, VOCAB_SIZE),)},
        {"allowed_token_ids": (VOCAB_SIZE,)},
        {"allowed_token_ids": (-1,)},
        {"allowed_token_ids": (A,), "bad_words": ((A,),)},
    ],
    ids=str,
)
def test_the_engine_refuses_what_no_gateway_sends(fields):
    drive = Driver(ScriptedRunner())
    drive.send(generate_request("r", sampling=SamplingParams(seed=0, **fields)))
    drive.step()
    assert isinstance(drive.endings[LINK, "r"], Failed)


def test_a_grammar_and_bans_are_refused():
    drive = Driver(ScriptedRunner())
    params = SamplingParams(seed=0, bad_words=((A,),))
    drive.send(generate_request("r", sampling=params, grammar='start: "a"'))
    drive.step()
    assert "together with bans" in drive.endings[LINK, "r"].message


def expected(params, seed, num_tokens):
    """One choice without an engine: no ban but by looking for words in the text so far."""
    mask = bans(allowed_token_ids=params.allowed_token_ids).mask
    output: list[int] = []
    while len(output) < num_tokens:
        tokens = [*PROMPT, *output]
        banned = [
            word[-1]
            for word in params.bad_words
            if len(output) >= len(word) - 1 and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
        ]
        token = script(tokens, SampleSpec(params, seed, len(tokens), PROMPT, output))
        output.append(allowed(token, mask, banned))
    return output


PARAMS = {
    "words": {"bad_words": (*PAIRS, (ord(" "),), (*b"zab",))},
    "few": {"allowed_token_ids": tuple(b"efghij"), "bad_words": PAIRS[:40]},
    "some": {"allowed_token_ids": tuple(b"aeiou ")},
}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("proposer", [None, Informed, InformedTree], ids=str)
@pytest.mark.parametrize("name", PARAMS)
def test_every_draw_is_banned_what_its_own_output_says(name, proposer, lag):
    """Choices that fork, steps that are late, guesses right and wrong, and lost blocks."""
    params = SamplingParams(seed=3, temperature=1.0, **PARAMS[name])
    seeds = [choice_seed(params.seed, index) for index in range(3)]
    answers = {("r", i): expected(params, seeds[i], 40) for i in range(3)}
    free = SamplingParams(seed=3, temperature=1.0)
    assert all(expected(free, seeds[i], 40) != answers["r", i] for i in range(3))
    speculate = speculating(proposer(answers)) if proposer else None
    drive = Driver(ScriptedRunner(block_size=4), lag=lag, device={}, speculate=speculate)
    drive.send(generate_request("r", PROMPT, 40, sampling=params, num_choices=3))
    source, num_preempted = random.Random(7), 0
    while not drive.idle:
        drive.step()
        running = drive.scheduler.running["interactive"]
        if running and source.random() < 0.1:
            drive.scheduler.ranks.preempt(source.choice(running), drive.now, "blocks")
            num_preempted += 1
    drive.check_idle()
    assert num_preempted
    for (_, index), answer in answers.items():
        assert drive.tokens[LINK, "r", index] == answer
    if proposer:
        assert drive.engine.totals.num_accepted > 0


def test_a_choice_that_is_handed_over_knows_what_it_drew():
    params = SamplingParams(seed=3, temperature=1.0, **PARAMS["words"])
    answer = expected(params, 3, 30)
    for cut in range(1, 30, 4):
        drive = Driver(ScriptedRunner(block_size=4))
        message = generate_request("r", PROMPT, 30, sampling=params, attempt=1, resume=((0, tuple(answer[:cut])),))
        drive.send(message)
        drive.run()
        assert drive.tokens[LINK, "r", 0] == answer[cut:]


def test_only_bans_that_depend_on_the_last_token_wait_for_it():
    def num_late(**fields):
        drive = Driver(ScriptedRunner(block_size=4), lag=1)
        params = SamplingParams(seed=3, temperature=0.0, **fields)
        drive.send(generate_request("r", PROMPT, 20, sampling=params))
        drive.run().check_idle()
        return drive.runner.num_late

    assert num_late(bad_words=((A,),), allowed_token_ids=(A, B)) == num_late() > 10
    assert num_late(bad_words=((A, B),)) == 0
