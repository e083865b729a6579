"""The coordinator's process dies, or stops: another node takes its place, with the same epochs, weights and tokens."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cluster.processes import descendants, wait_until_gone
from tests.support.commands.forked_command import ForkedCommand
from tests.support.models.families import save_model
from tests.support.serving.first_coordinator import SIZES
from tllm.engine.engine import Engine
from tllm.spec.request import Request, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch

TAKEOVER_SECONDS = 25.0
"""Some five on a quiet machine. A request waits for 30."""
PROMPT = (1, 2, 3, 4)
PARAMS = (
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True),
)
REQUESTS = [Request(id=f"r{number}", prompt_ids=PROMPT, params=params) for number, params in enumerate(PARAMS)]


class Spoken:
    """A process that prints a line of JSON for each thing that happens to it."""

    def __init__(self, *words: str) -> None:
        self.process = ForkedCommand(
            [sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def says(self, key: str, seconds: float = 100.0) -> dict[str, Any]:
        """The next thing that it says with this key."""
        end = time.monotonic() + seconds
        while True:
            said = self._said.get(timeout=max(end - time.monotonic(), 0.0))
            if key in said:
                return said

    @property
    def is_silent(self) -> bool:
        return self._said.empty()

    def tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in self.process.stdout:
                self._said.put(json.loads(line))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    return folder


@contextlib.contextmanager
def three_machines(model: Path) -> Iterator[tuple[Spoken, list[Spoken]]]:
    """A coordinator with a worker of its own, and two nodes that joined; each of the three has the state."""
    first = Spoken("tests.support.serving.first_coordinator", str(model), "pp=3", "1", "3")
    nodes: list[Spoken] = []
    try:
        invited = first.says("address")
        host, _, port = invited["address"].rpartition(":")
        for name in ("north", "south"):
            node = Spoken("tests.support.serving.succeeding_node", msgspec.json.encode(REQUESTS).decode())
            settings = dict(host=host, port=int(port), token=invited["token"], node=name, threads=1, rejoin=30)
            node.tell(json.dumps(settings).encode() + b"\n")
            nodes.append(node)
        while len(first.says("replicas")["replicas"]["nodes"]) < 3:
            continue
        yield first, nodes
    finally:
        for process in (first, *nodes):
            process.end()
        assert wait_until_gone(descendants()) == []


def taken_over(nodes: list[Spoken], seconds: float) -> tuple[dict[str, Any], float]:
    """What the node says that took over, and after how long."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        for node in nodes:
            if not node.is_silent:
                return node.says("ids"), time.monotonic() - began
        time.sleep(0.01)
    raise AssertionError(f"nobody took over within {seconds:g} s")


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[int]]:
    with Engine.load(model, "pp=1", SIZES) as engine:
        return [engine.generate([PROMPT], params)[0] for params in PARAMS]


def test_a_killed_coordinator_is_followed_by_another_node(model: Path, truth: list[list[int]]) -> None:
    whole = (model / "model.safetensors").stat().st_size
    with three_machines(model) as (first, nodes):
        os.kill(first.process.pid, signal.SIGKILL)
        said, seconds = taken_over(nodes, 60.0)
        print(f"from SIGKILL to the replies of the cluster that was taken over: {seconds:.1f} s")
        assert said["ids"] == truth
        assert said["epoch"] == 2
        assert sum(said["read"]) < whole, "weights in memory are kept"
        assert seconds < TAKEOVER_SECONDS


def test_a_coordinator_that_was_only_stopped_finds_itself_deposed(model: Path, truth: list[list[int]]) -> None:
    """It is fenced: when it wakes it says so, begins no epoch, ends no node, and finds who coordinates now."""
    with three_machines(model) as (first, nodes):
        os.kill(first.process.pid, signal.SIGSTOP)
        said, _ = taken_over(nodes, 60.0)
        assert said["ids"] == truth
        os.kill(first.process.pid, signal.SIGCONT)
        assert "coordinates no more" in first.says("fault")["fault"]
        assert first.says("successor")["successor"] is not None
        assert first.process.wait(30) != 0
        time.sleep(1.0)
        assert [node.process.poll() for node in nodes] == [None, None]


def test_a_coordinator_whose_system_fails_it_lets_another_take_its_place(model: Path, truth: list[list[int]]) -> None:
    with three_machines(model) as (first, nodes):
        first.tell(b"\n")
        said, seconds = taken_over(nodes, 60.0)
        assert said["ids"] == truth and seconds < TAKEOVER_SECONDS
        assert "Too many open files" in first.says("fault")["fault"]
        assert first.process.wait(30) != 0


def test_nobody_follows_a_coordinator_that_ended_the_cluster(model: Path) -> None:
    with three_machines(model) as (first, nodes):
        assert first.process.stdin is not None
        first.process.stdin.close()
        assert first.process.wait(30) == 0
        assert [node.process.wait(30) for node in nodes] == [0, 0]
        assert all(node.is_silent for node in nodes)
