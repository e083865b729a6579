"""--allow-mixed comes all the way from the command line to the door."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.training.small_job import write_job
from tllm.cli.main import main
from tllm.cluster.certificates import Authority
from tllm.core.errors import TllmError
from tllm.node.coordinator.coordinator import Coordinator


class FarEnough(TllmError):
    """What a test wanted to see has been seen."""


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each door that a coordinator is built with takes other programs; nothing is started behind it."""
    seen: list[bool] = []
    build = Coordinator.__init__

    def build_and_end(
        self: Coordinator, job: Any, work: Any, authority: Authority, address: Any, first: Sequence[str] = ()
    ) -> None:
        build(self, job, work, authority, address, first)
        seen.append(self.control_server.allow_mixed)
        self.control_server._socket.close()
        raise FarEnough("built")

    monkeypatch.setattr(Coordinator, "__init__", build_and_end)
    return seen


@pytest.mark.parametrize("allowed", [False, True])
def test_serving(allowed: bool, folder: Path, doors: list[bool]) -> None:
    (folder / "model.safetensors").write_bytes(b"")  # never read
    words = ["serve", str(folder), "--port", "0", "--local", "2", *(["--allow-mixed"] if allowed else [])]
    assert main(words) == FarEnough.exit_code
    assert doors == [allowed]


@pytest.mark.parametrize("allowed", [False, True])
def test_training(allowed: bool, tmp_path: Path, doors: list[bool]) -> None:
    words = ["train", str(write_job(tmp_path)), "--plan", "dp=2", *(["--allow-mixed"] if allowed else [])]
    assert main(words) == FarEnough.exit_code
    assert doors == [allowed]


def test_a_doctor_looks_at_whoever_comes(doors: list[bool]) -> None:
    assert main(["doctor", "--local", "2"]) == FarEnough.exit_code
    assert doors == [True]
