"""What an input file may be. Everything here is bytes in, faults out."""

from __future__ import annotations

import json
import tracemalloc
from codecs import BOM_UTF8

import pytest

from accounting.batches import validate as validation
from accounting.batches.validate import MAX_LINES, split, validate

ENDPOINT = "/v1/chat/completions"


def line(number: int = 0, **changes) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": f"hello {number}"}]}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": body} | changes).encode()


def faults(content: bytes, part_bytes: int = 7) -> list[tuple[str, int | None]]:
    parts = [content[i : i + part_bytes] for i in range(0, len(content), part_bytes)]
    found = validate(parts, ENDPOINT, {"m", "n"})
    return [(fault.code, fault.line_no) for fault in ([found.whole] if found.whole else found.faults)]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [b"", b"\n"])
def test_both_line_endings_and_a_missing_last_one_are_fine(ending, last):
    content = line(1) + ending + line(2) + last
    assert faults(content) == []
    found = validate([content], ENDPOINT, {"m"})
    for placed in found.lines:
        text = content[placed.offset : placed.offset + placed.num_bytes]
        assert json.loads(text)["custom_id"] == f"c{placed.line_no}"


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("part_bytes", [1, 2, 1000])
def test_a_byte_order_mark_in_front_of_the_file_is_no_part_of_its_first_line(ending, part_bytes):
    """Programs of Windows write one, and the first line was no JSON."""
    content = BOM_UTF8 + line(1) + ending + line(2)
    assert faults(content, part_bytes) == []
    parts = [content[i : i + part_bytes] for i in range(0, len(content), part_bytes)]
    for placed in validate(parts, ENDPOINT, {"m"}).lines:
        assert content[placed.offset : placed.offset + placed.num_bytes] == line(placed.line_no)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"", "invalid_json_line"),
        (b"   ", "invalid_json_line"),
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b"null", "invalid_json_line"),
        (b"\xef\xbb\xbf" + line(1), "invalid_json_line"),
        (b'{"custom_id": "\xff"}', "invalid_json_line"),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b'{"body":' + b"[" * 5000, "invalid_json_line"),
        (line(1, body=[]), "invalid_json_line"),
        (line(1, body=None), "invalid_json_line"),
        (line(1)[:-1] + b', "custom_id": "c9"}', "invalid_json_line"),
        (b'{"method": "GET", ' + line(1)[1:], "invalid_json_line"),
        (line(1)[:-1] + b', "\\u0075rl": "' + ENDPOINT.encode() + b'"}', "invalid_json_line"),
        (b'{"body": {"model": "n"}, ' + line(1)[1:], "invalid_json_line"),
        (b'{"x": [{}], "x": 1, ' + line(1)[1:], "invalid_json_line"),
        (line(1, x="x" * validation.MAX_BESIDE_BYTES), "invalid_json_line"),
        (line(1, custom_id=None), "missing_custom_id"),
        (line(1, custom_id=7), "missing_custom_id"),
        (line(1, custom_id=""), "missing_custom_id"),
        (line(1, custom_id="x" * 513), "missing_custom_id"),
        (line(1, custom_id="x\0"), "missing_custom_id"),
        (line(1, custom_id="c0"), "duplicate_custom_id"),
        (line(1, method="GET"), "invalid_method"),
        (line(1, url="/v1/batches"), "mismatched_url"),
        (line(1, url="http://169.254.169.254/latest"), "mismatched_url"),
        (line(1, url=ENDPOINT + "?x=1"), "mismatched_url"),
        (line(1, body={"model": "n"}), "mismatched_model"),
        (line(1, body={"model": "unknown"}), "model_not_found"),
        (line(1, body={"model": ["m"]}), "model_not_found"),
        (line(1, body={}), "model_not_found"),
    ],
)
def test_attack_E07_a_bad_line_is_named_by_its_number(bad, code):
    assert faults(line(0) + b"\n" + bad + b"\n" + line(2), 4096) == [(code, 2)]


def test_what_is_inside_a_body_is_not_judged_here():
    body = {"model": "m", "max_tokens": -1, "stream": True, "messages": "nonsense"}
    assert faults(line(0, body=body)) == []


def test_a_key_that_two_objects_have_is_not_there_twice():
    body = {"model": "m", "custom_id": "c0", "body": {"url": ENDPOINT}}
    more = {"x": {"url": 1, "body": body, "custom_id": json.dumps(body)}, "body": body}
    assert faults(line(0, **more) + b"\n" + line(1, x=[body, "é\n"])) == []


def test_values_in_a_line_take_no_multiple_of_its_bytes():
    """Lists of lists took fifty times their bytes: one line of 16 MiB ended the process that checked it."""
    deep = b",".join([b"[" * 900 + b"]" * 900] * 1200)
    for field in (b'"body": {"model": "m", "x": [%s]}', b'"body": {"model": "m", "input": [%s]}', b'"url": [%s]'):
        content = b'{"custom_id": "c", "method": "POST", "url": "%s", ' % ENDPOINT.encode() + field % deep + b"}"
        assert len(content) > validation.MAX_CANONICAL_BYTES
        tracemalloc.start()
        try:
            validate([content], ENDPOINT, {"m"})
            assert tracemalloc.get_traced_memory()[1] < 6 * len(content)
        finally:
            tracemalloc.stop()


def test_long_lines_are_sorted_by_what_precedes_generation():
    texts = [letter * validation.MAX_CANONICAL_BYTES + str(number) for number, letter in enumerate("abab")]
    lines = [line(n, body={"seed": n, "model": "m", "prompt": text}) for n, text in enumerate(texts)]
    found = validate([b"\n".join(lines)], ENDPOINT, {"m"})
    by_prefix = sorted(found.lines, key=lambda placed: placed.sort_key)
    assert [placed.line_no for placed in by_prefix] == [1, 3, 2, 4]
    assert all(placed.predicted_tokens > validation.MAX_CANONICAL_BYTES // 4 for placed in found.lines)


def test_an_empty_file_and_one_with_too_many_lines_sink_as_a_whole():
    assert faults(b"") == [("empty_file", None)]
    many = b"".join(line(i) + b"\n" for i in range(MAX_LINES + 1))
    found = validate([many[: -len(line(MAX_LINES)) - 1]], ENDPOINT, {"m"})
    assert (found.num_lines, found.whole, len(found.lines)) == (MAX_LINES, None, MAX_LINES)
    assert faults(many, 65536) == [("too_many_lines", None)]


def test_a_huge_line_is_refused_without_being_held(monkeypatch):
    monkeypatch.setattr(validation, "MAX_LINE_BYTES", 1000)
    huge = b'{"custom_id": "' + b"x" * 50_000
    content = line(0) + b"\n" + huge + b"\n" + line(2) + b"\n"
    assert faults(content, 100) == [("invalid_json_line", 2)]
    held = max(len(raw or b"") for _, raw in split((content[i : i + 64] for i in range(0, len(content), 64)), 1000))
    assert held <= 1000
    offsets = [offset for offset, _ in split([content])]
    assert offsets == [0, len(line(0)) + 1, len(line(0)) + len(huge) + 2]


def test_a_duplicate_keeps_its_custom_id_to_itself():
    content = line(0) + b"\n" + line(1, custom_id="c0") + b"\n" + line(2, method="GET")
    found = validate([content], ENDPOINT, {"m"})
    assert [fault.custom_id for fault in found.faults] == [None, "c2"]


def test_pieces_of_any_size_give_the_same_lines():
    content = b"".join(line(i) + (b"\r\n" if i % 2 else b"\n") for i in range(20)) + b"\n\n"
    whole = list(split([content]))
    for size in (1, 2, 3, 64, 1000):
        assert list(split(content[i : i + size] for i in range(0, len(content), size))) == whole
