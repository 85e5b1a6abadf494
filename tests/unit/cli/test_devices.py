from __future__ import annotations

from gateway.cli.devices import share, visible_devices


def test_devices_are_those_of_the_variable_or_else_of_the_machine(tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_devices({}, tmp_path) == ["0", "2", "10"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}, tmp_path) == ["3", "GPU-ab"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_workers_have_devices_of_their_own_where_there_are_enough():
    devices = ["0", "1", "2", "3", "4"]
    assert [share(devices, slot, 2, 2)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["0,1", "2,3"]
    assert share(devices, 4, 5, 1) == {"CUDA_VISIBLE_DEVICES": "4"}
    assert share(devices, 0, 3, 2) == share(devices, 0, 1, 2) == share([], 1, 2, 1) == {}
