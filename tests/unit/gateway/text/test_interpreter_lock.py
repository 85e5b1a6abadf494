"""S2: what the text threads do with megabytes leaves the interpreter to others meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_model import tokenizer_spec, write_byte_model

from gateway.base.errors import ApiError
from gateway.base.settings import ModelSource
from gateway.generation.served import model_files
from gateway.intake.fingerprints import fingerprint_in_pieces
from gateway.intake.json_body import decode_object
from gateway.text.tokenizer import ModelTokenizer, TooManyTokens

TOKENIZER = ModelTokenizer(tokenizer_spec())
TEXT = "hello world, this is a test. " * 10_000


def longest_stop(function: Callable[[], Any]) -> float:
    """The longest time for which nobody else could run, as a part of the time that it took."""
    over = threading.Event()
    gaps: list[float] = []

    def watch() -> None:
        while not over.is_set():
            before = time.perf_counter()
            time.sleep(0.0005)
            gaps.append(time.perf_counter() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    time.sleep(0.01)
    gaps.clear()
    started = time.perf_counter()
    function()
    took = time.perf_counter() - started
    over.set()
    watching.join()
    return max(gaps) / took


@pytest.mark.parametrize(
    "work",
    [
        lambda: TOKENIZER.encode_plain(TEXT),
        lambda: TOKENIZER.decode_long([65] * 500_000),
        lambda: decode_object(json.dumps({"a": [[1] * 9] * 20_000, "b": "\n" * 10**6}).encode()),
        lambda: fingerprint_in_pieces("/", {"a": ["\n" * 10**6] * 8}),
    ],
    ids=["encode", "decode", "json", "fingerprint"],
)
def test_s2_no_step_of_text_work_holds_the_interpreter_for_most_of_its_time(work: Callable[[], Any]) -> None:
    # Once of five times: on a busy machine the watcher may not be let in for other reasons.
    assert any(longest_stop(work) < 0.5 for _ in range(5))


def test_a_text_of_too_many_tokens_is_refused_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(TooManyTokens) as refused:
        TOKENIZER.encode_plain("x" * 101, most=100)
    assert refused.value.num_tokens == 101
    model = model_files.load("m", ModelSource(path=str(write_byte_model(tmp_path / "model", 10**6))))
    assert len(model.encode_text("x" * 500_000)) == 500_000
    small = model_files.load("m", ModelSource(path=str(write_byte_model(tmp_path / "small", 300_000))))
    with pytest.raises(ApiError) as error:
        small.encode_chat([{"role": "user", "content": "<|eos|>" * 60_000}])
    assert error.value.code == "context_length_exceeded"


def test_s2_a_chat_has_a_bounded_number_of_messages(tmp_path: Path) -> None:
    model = model_files.load("m", ModelSource(path=str(write_byte_model(tmp_path / "model", 10**6))))
    with pytest.raises(ApiError) as error:
        model.encode_chat([{"role": "user", "content": "x"}] * 10_001)
    assert error.value.param == "messages"
    assert "10,000" in error.value.message
