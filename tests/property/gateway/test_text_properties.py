"""Text of any kind, cut at any place: nothing lost, nothing doubled, nothing half."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from byte_model import CONTROL, tokenizer_spec
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.base.errors import ApiError
from gateway.intake import fingerprints
from gateway.intake.fingerprints import fingerprint, fingerprint_in_pieces
from gateway.intake.json_body import decode_object
from gateway.text.choice import ChoiceText, TextRules
from gateway.text.detokenizer import detokenizer
from gateway.text.stops import StopMatcher, StopStrings
from gateway.text.tokenizer import ModelTokenizer
from workers.protocol.messages import TokenLogprob


def sentencepiece_spec() -> dict[str, Any]:
    """A small vocabulary with byte fallback, as Llama 2 and Mistral have."""
    words = ["▁", "▁the", "▁cat", "s", "a", "t", "é", "漢", "▁▁", "!", "\n"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(["<unk>", "<s>", "</s>"])
    ]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": None,
        "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [],
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }


BYTE_LEVEL = ModelTokenizer(tokenizer_spec())
SENTENCEPIECE = ModelTokenizer(sentencepiece_spec())
TOKENIZERS = {"byte level": BYTE_LEVEL, "byte fallback": SENTENCEPIECE}


def pieces(tokenizer: ModelTokenizer, ids: Sequence[int], skip: bool) -> list[str]:
    tokens = detokenizer(tokenizer, skip)
    return [*(tokens.push(token) for token in ids), tokens.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_pieces_concatenate_to_the_decoding_of_the_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(max_size=60))
def test_no_piece_of_valid_text_has_half_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode_plain(text)
    if "\ufffd" in text:
        return
    parts = pieces(tokenizer, ids, True)
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts) == tokenizer.decode(ids)


def naive(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The stop string that is complete first; of several that end at one place, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
@example(parts=["aab", "ab"], stops=["abab"], include=False)
@example(parts=["a", "b"], stops=["b", "ab"], include=False)
def test_stop_strings_cut_as_if_the_text_came_at_once(parts: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(StopStrings(stops), include)
    seen = ""
    found = None
    for part in parts:
        out, found = matcher.push(part)
        seen += out
        if found is not None:
            break
    else:
        seen += matcher.flush()
    assert (seen, found) == naive("".join(parts), stops, include)


def pushed_plainly(parts: Sequence[str], stops: Sequence[str], include: bool) -> list[tuple[str, str | None]]:
    """What each piece lets out, as the rule says it: look for the first end in all of the text, else hold back the
    longest end that a stop string begins with.
    """
    answers: list[tuple[str, str | None]] = []
    held = ""
    for part in parts:
        text = held + part
        out, found = naive(text, stops, include)
        if found is not None:
            return [*answers, (out, found)]
        sizes = (size for stop in stops for size in range(min(len(stop) - 1, len(text)) + 1))
        keep = max(size for size in sizes if any(stop.startswith(text[len(text) - size :]) for stop in stops))
        held = text[len(text) - keep :]
        answers.append((text[: len(text) - keep], None))
    return [*answers, (held, None)]


similar_stops = st.one_of(
    st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=6),
    st.lists(st.text("ab c", min_size=1, max_size=4), min_size=1, max_size=16),
    # The stop strings share a beginning and are of different lengths.
    st.builds(
        lambda begin, ends: [begin + end for end in ends],
        st.text("ab", min_size=1, max_size=6),
        st.lists(st.text("ab ", max_size=4), min_size=1, max_size=6),
    ),
)


@given(
    texts=st.lists(st.lists(st.text("ab ", max_size=9), max_size=12), min_size=1, max_size=3),
    stops=similar_stops,
    include=st.booleans(),
    data=st.data(),
)
@example(texts=[["aaaa", "a", "ac"]], stops=["aab", "aaac", "aaaaab"], include=False, data=None)
@example(texts=[["xa", "b", "c"]], stops=["xabd", "abc", "b c"], include=False, data=None)
@example(texts=[["ab ", "x"]], stops=["abc", "ab", "ab x"], include=True, data=None)
def test_each_piece_lets_out_what_the_plain_rule_says_whichever_choice_is_next(
    texts: list[list[str]], stops: list[str], include: bool, data: st.DataObject | None
) -> None:
    """Several choices share the stop strings, which see their pieces in any order."""
    shared = StopStrings(stops)
    matchers = [StopMatcher(shared, include) for _ in texts]
    answers: list[list[tuple[str, str | None]]] = [[] for _ in texts]
    running = list(range(len(texts)))
    while running:
        index = running[0] if data is None else data.draw(st.sampled_from(running))
        done, matcher = answers[index], matchers[index]
        if len(done) == len(texts[index]):
            done.append((matcher.flush(), None))
            running.remove(index)
        else:
            done.append(matcher.push(texts[index][len(done)]))
            if done[-1][1] is not None:
                running.remove(index)
    assert answers == [pushed_plainly(parts, stops, include) for parts in texts]


@given(text=st.text("aé漢", max_size=30), stops=st.lists(st.text("aé", min_size=1, max_size=4), max_size=2))
def test_text_and_token_entries_stay_in_step(text: str, stops: list[str]) -> None:
    """Entries of the text that went out, in order, each at its place; none behind a stop string."""
    ids = list(text.encode())
    choice = ChoiceText(BYTE_LEVEL, TextRules(stops=StopStrings(stops) if stops else None))
    out, entries, num_pushed = "", [], 0
    for token in ids:
        piece = choice.push(token, TokenLogprob(-float(num_pushed)))
        out, num_pushed = out + piece.text, num_pushed + 1
        entries += piece.entries
        if choice.stop is not None:
            break
    else:
        piece = choice.end()
        out += piece.text
        entries += piece.entries
    assert out == naive(text, stops, False)[0]
    assert choice.num_tokens == num_pushed
    assert [entry.token for entry in entries] == ids[: len(entries)]
    assert all(entry.offset < max(1, len(out)) or not out for entry in entries[:-3])
    if choice.stop is None:
        assert len(entries) == len(ids)


fragments = st.lists(
    st.one_of(
        st.sampled_from(sorted(CONTROL)),
        st.sampled_from(["<", "<|", "|>", "<|eo", "s|>", ">", "|", " "]),
        st.text(max_size=5),
    ),
    max_size=6,
).map("".join)


@given(contents=st.lists(fragments, min_size=1, max_size=5))
def test_no_control_token_ever_comes_of_a_users_text(contents: list[str]) -> None:
    """Pieces side by side, with the template's own tokens between: only those remain, and all text survives."""
    rendered = "<|bos|>" + "<|eos|>".join(BYTE_LEVEL.break_up(content) for content in contents)
    joined = "".join(BYTE_LEVEL.break_up(content) for content in contents)
    ids = BYTE_LEVEL.encode_rendered(rendered)
    assert [one for one in ids if one >= 256] == [256, *[257] * (len(contents) - 1)]
    assert all(one < 256 for one in BYTE_LEVEL.encode_rendered(joined))
    assert BYTE_LEVEL.decode(ids, False) == "<|bos|>" + "<|eos|>".join(contents)


@given(text=fragments)
def test_plain_text_encodes_without_control_tokens(text: str) -> None:
    for tokenizer in TOKENIZERS.values():
        assert not set(tokenizer.encode_plain(text, add_special_tokens=False)) & (tokenizer.special_ids - {0})
    assert bytes(BYTE_LEVEL.encode_plain(text)).decode() == text


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=20,
)


@given(value=st.dictionaries(st.text(), json_values, max_size=5), ascii_only=st.booleans())
def test_json_that_everybody_reads_alike_is_read_so(value: dict[str, Any], ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only)
    try:
        body = data.encode()
    except UnicodeEncodeError:
        return
    assert decode_object(body) == value


@given(body=st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    try:
        outcome: Any = decode_object(body)
    except ApiError as error:
        outcome = error.status
    assert isinstance(outcome, dict) or outcome == 400


@given(
    value=st.dictionaries(st.text(), json_values, max_size=5),
    size=st.integers(1, 5),
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
)
def test_s2_a_fingerprint_made_in_pieces_is_the_one_made_at_once(value: dict[str, Any], size: int, path: str) -> None:
    with mock.patch.multiple(fingerprints, PIECE_CHARS=size, PIECE_ITEMS=size):
        in_pieces = fingerprint_in_pieces(path, value)
    assert in_pieces == fingerprint(path, value)


@given(
    tokens=st.lists(
        st.one_of(st.sampled_from(list("aé漢😀".encode())), st.sampled_from(list(CONTROL.values()))), max_size=30
    ),
    sizes=st.lists(st.integers(1, 4), max_size=10),
)
def test_tokens_that_nobody_wants_to_see_become_the_same_text(tokens: list[int], sizes: list[int]) -> None:
    one_by_one, together = ChoiceText(BYTE_LEVEL, TextRules()), ChoiceText(BYTE_LEVEL, TextRules(shows_tokens=False))
    assert together.is_plain
    assert not one_by_one.is_plain
    expected = "".join(one_by_one.push(token).text for token in tokens) + one_by_one.end().text
    found, start = "", 0
    for size in [*sizes, len(tokens)]:
        found += together.extend(tokens[start : start + size])
        start += size
    assert found + together.end().text == expected
    assert together.num_tokens == one_by_one.num_tokens == len(tokens)
    spans = [(0, 2), (3, None)]
    assert together.num_begun_in(spans) == one_by_one.num_begun_in(spans)
