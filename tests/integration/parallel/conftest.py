"""Two ranks over gloo: the test is rank 0, a child process rank 1."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import TinyModel

from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.parallel.group import Member
from workers.engine.parallel.runner import ParallelRunner
from workers.engine.parallel.wire import Channel, Leave, Loaded, Said, frame

SECOND_RANK = Path(__file__).parents[2] / "second_rank.py"


class Pair:
    """Also stands in the place of `Ranks`, which would end the test's own process with a rank."""

    def __init__(self, meeting: Path) -> None:
        mine, its = socket.socketpair()
        with its:
            told = [str(meeting), str(its.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, str(SECOND_RANK), *told], stdin=subprocess.PIPE, pass_fds=(its.fileno(),)
            )
        self._channel = Channel(mine)
        self._member = Member(0, 2, meeting, "cpu")
        self._following = False

    def runner(self, model: TinyModel, **settings: object) -> ParallelRunner:
        """Both ranks load the model; rank 1 leaves the one that it had."""
        if self._following:
            self.send(Leave())
        self._following = True
        given = {"num_blocks": 48, "block_size": 4, "device": "cpu", **settings}
        given["model"] = str(model.directory)
        self.process.stdin.write(json.dumps(given).encode() + b"\n")
        self.process.stdin.flush()
        return ParallelRunner(ModelRunner(RunnerSettings(**given), self._member), self)

    def send(self, message: Said) -> None:
        self._channel.send(frame(message))

    def wait_until_loaded(self) -> None:
        assert isinstance(self._channel.receive(), Loaded)

    def wait_for_news(self) -> None:
        pass

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self._channel.close()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pair = Pair(tmp_path_factory.mktemp("pair") / "meeting")
    yield pair
    pair.close()
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            made[name] = TinyModel.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make
