"""What the command line says of nodes comes to the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.small_job import write_job
from tllm.cli.main import main
from tllm.ground.errors import ConfigError, TllmError
from tllm.node import training


class FarEnough(TllmError):
    """What a test wanted to see has been seen."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a run is opened with; nothing is started."""
    seen: list[dict[str, Any]] = []

    def open_none(*given: object, **named: Any) -> NoReturn:
        seen.append(named)
        raise FarEnough("opened")

    monkeypatch.setattr(training, "open_training", open_none)
    monkeypatch.setattr(training, "open_launched", open_none)
    return seen


@pytest.mark.parametrize("is_launched", [False, True])
def test_memory_and_patience(
    is_launched: bool, tmp_path: Path, opened: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_launched:
        for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost").items():
            monkeypatch.setenv(name, value)
    job = [str(write_job(tmp_path)), "--plan", "dp=2"]
    assert main(["train", *job, "--memory", "12GiB", "--lost-after", "20"]) == FarEnough.exit_code
    assert main(["train", *job]) == FarEnough.exit_code
    assert [(one["memory"], one["lost_after"]) for one in opened] == [(12 << 30, 20.0), (None, 5.0)]


def test_nobody_is_given_up_before_it_can_be_late(
    tmp_path: Path, opened: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(write_job(tmp_path)), "--plan", "dp=2", "--lost-after", "1"]
    assert main(words) == ConfigError.exit_code
    assert "after 1 s of silence" in capsys.readouterr().err and opened == []
