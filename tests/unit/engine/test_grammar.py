"""An automaton's own rules, with a backend that is made up; and a vocabulary's bytes."""

from __future__ import annotations

import gc
import json
import time
import weakref

import pytest
from byte_model import CONTROL, tokenizer_spec
from engine_driver import LINK
from fakes import generate_request
from load import stretched
from simulation import BlindRunner, paced_driver

from workers.engine.grammars import grammar, mask_time, vocabulary
from workers.engine.grammars.compiling import Grammars
from workers.engine.grammars.grammar import Automaton, GrammarError, begin
from workers.engine.grammars.mask_time import AT_ONCE_S, EACH_S, MAX_TENANTS, MaskTime, MaskTimes

END = 9


class Words:
    """Accepts the given runs of ids, and nothing else."""

    num_bytes = 1
    vocab_size = 10

    def __init__(self, *words, output=(), slow_s=0.0):
        self.words = words
        self.output = list(output)
        self.slow_s = slow_s

    def start(self):
        return Words(*self.words, slow_s=self.slow_s)

    def fork(self):
        return Words(*self.words, output=self.output, slow_s=self.slow_s)

    def accept(self, token):
        fits = bool(self._next() >> token & 1)
        if fits:
            self.output.append(token)
        return fits

    def mask(self):
        end = time.thread_time() + self.slow_s
        while time.thread_time() < end:
            pass
        beyond = 1 << 15  # behind the vocabulary: a library may leave such bits set
        return (self._next() | beyond).to_bytes(4, "little")

    def may_end(self):
        return tuple(self.output) in self.words

    def _next(self):
        size = len(self.output)
        fitting = [w for w in self.words if list(w[:size]) == self.output and len(w) > size]
        return sum({1 << word[size] for word in fitting})


def bits(*tokens):
    return sum(1 << token for token in tokens).to_bytes(4, "little")


def test_end_tokens_are_allowed_where_the_text_may_end_and_nowhere_else():
    one = begin(Words((1, 2), (1,), (1, END)), [END])
    assert one.mask == bits(1)
    one.advance(1)
    assert (one.mask, one.ended) == (bits(2, END), False)
    one.advance(2)
    assert one.ended and not one.fault


def test_a_text_that_can_go_on_only_with_an_end_token_of_the_request_is_over():
    one = begin(Words((1, END, 3), (1,)), [END])
    one.advance(1)
    assert one.ended


def test_a_place_without_a_way_on_is_a_fault():
    one = begin(Words((1, END, 3)), [END])
    one.advance(1)
    assert "no token" in one.fault and not one.ended


def test_a_token_outside_of_the_grammar_is_a_fault_that_stays():
    one = begin(Words((1, 2, 3)), [END])
    one.advance(5)
    assert "outside" in one.fault
    one.advance(1)
    assert "outside" in one.fault


@pytest.mark.parametrize(("compiled", "output"), [(Words(()), ()), (Words((END,)), ()), (Words((1, 2)), (2,))])
def test_what_allows_nothing_does_not_begin(compiled, output):
    with pytest.raises(GrammarError):
        begin(compiled, [END], output)


def test_replayed_output_leads_to_the_same_place():
    words = Words((1, 2, 3), (1, 4))
    followed = begin(words, [END])
    followed.advance(1)
    assert begin(words, [END], [1]).mask == followed.mask == bits(2, 4)


def test_drafts_change_nothing():
    one = begin(Words((1, 2, 3), (1, 4)), [END])
    assert one.tree_masks([1, 4, 4], [-1, 0, 1]) == [bits(1), bits(2, 4), None, None]
    assert one.tree_masks([END], [-1]) == [bits(1), None] == [one.mask, None]
    tree = one.tree_masks([1, 2, 7, 2, END], [-1, 0, 1, -1, 0])
    assert tree == [bits(1), bits(2, 4), bits(3), None, None, None]
    one.advance(1)
    assert one.mask == bits(2, 4)


@pytest.mark.parametrize("place", ["fork", "accept", "mask"])
def test_a_panic_at_a_draft_is_a_fault_of_the_choice_and_leaves_it_in_its_place(monkeypatch, place):
    class Panic(BaseException):
        """Like what a library in Rust raises, this is no `Exception`."""

    def raising(*_):
        raise Panic

    begun = begin(Words((1, 2, 3)), [END])
    with monkeypatch.context() as patch:
        patch.setattr(Words, place, raising)
        assert begun.tree_masks([1, 2], [-1, 0]) == [bits(1), None, None]
    assert (begun.mask, begun.ended, begun.fault) == (bits(1), False, grammar.LOST)
    begun.advance(1)
    assert begun.fault == grammar.LOST


def test_a_grammar_that_is_slow_to_follow_is_a_fault(monkeypatch):
    monkeypatch.setattr(grammar, "SLOW_S", 0.01)
    assert "in time" in Automaton(Words((1,), slow_s=0.02), [END]).fault
    assert not Automaton(Words((1,)), [END]).fault


def test_masks_of_a_tenant_share_what_they_may_take():
    now = [0.0]
    mine = MaskTime(lambda: now[0])
    assert all(mine.took(EACH_S) for _ in range(10_000)), "usual masks are never too many"
    slow = [mine.took(0.04) for _ in range(100)]
    assert slow.index(False) == int(AT_ONCE_S / (0.04 - EACH_S))
    assert mine.took(EACH_S), "a quick one is no fault of the slow ones"
    assert not mine.took(0.04)
    now[0] += 10
    assert mine.took(0.04), "a part of the time is the tenant's"
    times = MaskTimes()
    assert times.of("a") is times.of("a") is not times.of("b")
    for number in range(MAX_TENANTS):
        times.of(str(number))
    assert len(times._by_tenant) == MAX_TENANTS


def test_masks_after_guesses_take_only_what_the_others_leave():
    now = [0.0]
    mine = MaskTime(lambda: now[0])
    took_s = guessed_s = 0.0
    while now[0] < 100:  # as slow as may be: nothing ends
        now[0] += 0.5
        assert mine.took(mask_time.SHARE * 0.5)
        took_s += mask_time.SHARE * 0.5
        while mine.may_guess():
            mine.took_guess(0.04)
            guessed_s += 0.04
    assert took_s + guessed_s <= mask_time.SHARE * now[0] + 2 * AT_ONCE_S
    assert guessed_s > AT_ONCE_S / 2
    now[0] += 20
    assert mine.may_guess()


def test_masks_after_guesses_end_no_request_and_are_not_made_any_more_once_they_took_too_long(monkeypatch):
    monkeypatch.setattr(mask_time, "AT_ONCE_S", 0.01)
    now, forks, fork = [0.0], [], Words.fork
    monkeypatch.setattr(Words, "fork", lambda self: forks.append(1) or fork(self))
    one = begin(Words((1, 2, 3, 4, 5, 6), slow_s=0.004), [END], mask_time=MaskTime(lambda: now[0]))
    for _ in range(20):
        guessed = one.tree_masks([1, 2, 3, 4], [-1, 0, 1, 2])
    assert guessed == [bits(1), None, None, None, None]
    assert len(forks) == 2, "with the one before they are beyond a hundredth of a second"
    one.advance(1)
    assert (one.mask, one.fault) == (bits(2), "")
    now[0] += 1
    assert one.tree_masks([2, 3], [-1, 0]) == [bits(2), bits(3), bits(4)], "a part of the time is the tenant's"


def test_a_refused_grammar_holds_no_request_that_asked_for_it(monkeypatch):
    """Each request left its attempt, with its prompt, in the traceback of the refusal that is kept."""
    grammars = Grammars(lambda: [])
    monkeypatch.setattr(grammars, "_tried", lambda text: "it is too large")
    drive = paced_driver(BlindRunner((0.001, 0, 0), num_blocks=64), grammars=grammars)
    admit, attempts = drive.engine._attempts._intake.admit, []

    def seen(*given):
        attempt = admit(*given)
        attempts.append(weakref.ref(attempt))
        return attempt

    monkeypatch.setattr(drive.engine._attempts._intake, "admit", seen)
    end = time.monotonic() + stretched(50)
    for name in ("first", "again"):  # the first one waits for the refusal, the second finds it
        drive.send(generate_request(name, grammar="start: /a/"))
        while (LINK, name) not in drive.endings:
            assert time.monotonic() < end
            drive.step()
        assert drive.endings[LINK, name].message == "it is too large"
    (kept,) = grammars._shelf._entries.values()
    grammars.close()
    drive.outputs.clear()  # they name the attempts that ended
    gc.collect()
    assert [attempt() for attempt in attempts] == [None, None]
    assert kept.__traceback__ is None


def test_a_byte_level_vocabulary_says_its_bytes(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_spec()))
    assert vocabulary.read(tmp_path, 261) == [
        *(bytes([i]) for i in range(256)),
        *(b"\xff" + text.encode() for text in CONTROL),
        b"",
        b"",
    ]


def test_a_sentencepiece_vocabulary_has_spaces_bytes_and_special_tokens_apart(tmp_path):
    vocab = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "▁the": 3, "é": 4, "<tool>": 5}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [(0, "<unk>", True), (1, "</s>", True), (5, "<tool>", False)]
    spec = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, "special": s} | flags for i, text, s in added],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": True},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    found = vocabulary.read(tmp_path, 7)
    assert found == [b"\xff<unk>", b"\xff</s>", b"\n", b" the", "é".encode(), b"<tool>", b""]
