from __future__ import annotations

import json

import pytest

from gateway.cli.devices import Room, alone, rooms, visible_devices, weight_bytes


def test_devices_are_those_of_the_variable_or_else_of_the_machine(tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["0", "2", "10"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}, tmp_path) == ["3", "GPU-ab"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_workers_have_devices_of_their_own_where_there_are_enough():
    devices = ["0", "1", "2", "3", "4"]
    assert [room.env for room in rooms(devices, [1, 1], [2, 2], 0.9, {})] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert rooms(devices, [1] * 5, [1] * 5, 0.9, {})[4].devices == ("4",)
    nothing = [room.env for room in rooms(devices, [1] * 3, [2] * 3, 0.9, {}) + rooms([], [1, 1], [1, 1], 0.9, {})]
    assert nothing == [{}] * 5


def test_workers_that_share_a_gpu_have_growing_shares_that_end_at_the_whole():
    first, second = rooms(["0"], [3000, 1000], [1, 1], 0.8, {})
    assert first == Room(("0",), pytest.approx(0.8 * (0.75 + 0.5) / 2))
    assert second == Room(("0",), pytest.approx(0.8))
    assert alone(first, 0.8).env == {"CUDA_VISIBLE_DEVICES": "0", "HEADGATE_ENGINE_MEMORY_SHARE": "0.800"}


def test_the_largest_model_has_a_gpu_to_itself_where_that_balances():
    found = rooms(["0", "1"], [10, 90, 20], [1] * 3, 0.9, {})
    assert [room.devices for room in found] == [("1",), ("0",), ("1",)]
    assert found[1].memory_share is None
    assert found[2].memory_share == pytest.approx(0.9)


def test_workers_share_a_free_gpu_rather_than_one_whose_worker_holds_it():
    large, small = rooms(["0", "1"], [15, 1], [1, 1], 0.9, {"0": 1})
    assert large.devices == small.devices == ("1",)
    assert small.memory_share == pytest.approx(0.9)


def test_weights_are_counted_once_where_a_directory_has_them_in_two_forms(tmp_path):
    for name, size in (("model-1.safetensors", 3), ("model-2.safetensors", 4), ("consolidated.safetensors", 7)):
        (tmp_path / name).write_bytes(b"w" * size)
    assert weight_bytes(tmp_path) == 14
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(tmp_path) == 7
    (tmp_path / "model.safetensors").write_bytes(b"w" * 9)
    assert weight_bytes(tmp_path) == 9
