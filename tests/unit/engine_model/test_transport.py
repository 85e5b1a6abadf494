"""What goes to the device in one copy arrives in its parts."""

from __future__ import annotations

from array import array

import torch

from workers.engine.kv.transport import Download, float_bits, upload, word_bits

CPU = torch.device("cpu")


def test_parts_arrive_apart_and_begin_at_multiples_of_16_bytes() -> None:
    parts = [array("i", range(size)) for size in (3, 0, 5, 4, 1)]
    arrived = upload(CPU, *parts)
    assert [tensor.tolist() for tensor in arrived] == [list(part) for part in parts]
    assert all(tensor.storage_offset() % 4 == 0 for tensor in arrived)
    assert {tensor.dtype for tensor in arrived} == {torch.int32}


def test_nothing_at_all_is_empty_tensors() -> None:
    assert [len(tensor) for tensor in upload(CPU, array("i"), array("i"))] == [0, 0]


def test_floats_and_words_travel_as_integers() -> None:
    floats, words = upload(CPU, float_bits([0.7, float("-inf")]), word_bits([2**32 - 1, 5]))
    assert torch.equal(floats.view(torch.float32), torch.tensor([0.7, float("-inf")]))
    assert (words.long() & 0xFFFFFFFF).tolist() == [2**32 - 1, 5]


def test_a_download_holds_what_was_there_when_it_began() -> None:
    buffer = torch.arange(4)
    download = Download([buffer[:2]])
    buffer.zero_()
    assert [tensor.tolist() for tensor in download.wait()] == [[0, 1]]
