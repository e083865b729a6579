"""What the command line says of nodes comes to the run, and what signals do to it once it is loaded."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.training.small_job import write_job
from tllm.cli.commands import train
from tllm.cli.main import main
from tllm.core.errors import ConfigError, TllmError
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.train import open_training as training
from tllm.training.checkpoint import save_folders


class FarEnough(TllmError):
    """What a test wanted to see has been seen."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ClusterOptions]:
    """What a run is opened with; nothing is started."""
    seen: list[ClusterOptions] = []

    def open_none(*given: object, **named: Any) -> NoReturn:
        (options,) = (one for one in given if isinstance(one, ClusterOptions))
        seen.append(options)
        raise FarEnough("opened")

    monkeypatch.setattr(training, "open_training", open_none)
    monkeypatch.setattr(training, "open_launched", open_none)
    return seen


@pytest.mark.parametrize("is_launched", [False, True])
def test_memory_and_patience(
    is_launched: bool, tmp_path: Path, opened: list[ClusterOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_launched:
        for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost").items():
            monkeypatch.setenv(name, value)
    job = [str(write_job(tmp_path)), "--plan", "dp=2"]
    assert main(["train", *job, "--memory", "12GiB", "--lost-after", "20"]) == FarEnough.exit_code
    assert main(["train", *job]) == FarEnough.exit_code
    assert [(one.memory, one.lost_after) for one in opened] == [(12 << 30, 20.0), (None, 5.0)]


@pytest.mark.parametrize("key", ["train_files", "eval_files"])
def test_a_missing_file_shows_before_machines_are_waited_for(
    key: str, tmp_path: Path, opened: list[ClusterOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(write_job(tmp_path)), "--nodes", "3", "--set", f"{key}={tmp_path}/gone.jsonl"]
    assert main(words) == ConfigError.exit_code
    assert "gone.jsonl is not there" in capsys.readouterr().err
    assert not opened and not (tmp_path / "run").exists()


def test_a_run_that_is_over_waits_for_no_machines(
    tmp_path: Path, opened: list[ClusterOptions], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(write_job(tmp_path, max_steps=9)), "--nodes", "3"]
    steps = [6]
    monkeypatch.setattr(save_folders, "steps_here", lambda folder: steps)
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    assert main(words) == FarEnough.exit_code, "the model is that of a shorter run"
    steps.append(9)
    save = final.parent / "step-9"
    save.mkdir()
    os.utime(final, ns=(0, 0))
    assert main(words) == FarEnough.exit_code, "it was killed before the model was made"
    os.utime(final)
    assert main(words) == 0 and len(opened) == 2
    assert f"has taken its 9 steps; the model is in {final}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        ([], 1),
        (["--nodes", "2"], 1),
        (["--nodes", "3"], 3),
        (["--nodes", "3", "--on-loss", "end"], 1),
        (["--nodes", "3", "--replicas-of-coordinator", "1"], 1),
        (["--nodes", "5", "--replicas-of-coordinator", "5"], 5),
    ],
)
def test_who_knows_the_state_of_the_run(
    options: list[str], replicas: int, tmp_path: Path, opened: list[ClusterOptions]
) -> None:
    assert main(["train", str(write_job(tmp_path)), *options]) == FarEnough.exit_code
    assert [one.replicas for one in opened] == [replicas]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "3", "--on-loss", "end"], "--on-loss end ends the run with any machine: none could take over"),
        (["--nodes", "2"], "need as many machines, and --nodes is 2"),
        (["--local", "3"], "need as many machines"),
    ],
)
def test_replicas_where_nobody_could_take_over_are_refused(
    options: list[str], words: str, tmp_path: Path, opened: list[ClusterOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write_job(tmp_path))
    assert main(["train", job, *options, "--replicas-of-coordinator", "3"]) == ConfigError.exit_code
    assert words in capsys.readouterr().err and opened == []


def test_nobody_is_given_up_before_it_can_be_late(
    tmp_path: Path, opened: list[ClusterOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(write_job(tmp_path)), "--plan", "dp=2", "--lost-after", "1"]
    assert main(words) == ConfigError.exit_code
    assert "after 1 s of silence" in capsys.readouterr().err and opened == []


class Run:
    """A run that notes that it is told to stop, and does not."""

    fault = None

    def __init__(self) -> None:
        self.told = asyncio.Event()

    def stop(self) -> None:
        assert not self.told.is_set(), "once"
        self.told.set()


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
def test_told_a_second_time_it_ends_what_it_began_in_order_though_told_a_third(again: int, before: object) -> None:
    """What ends a worker is a task beside it, which Python's own Ctrl-C would end too. A shell may ignore Ctrl-C."""
    told = list[str]()

    async def beside(over: asyncio.Event) -> None:
        await over.wait()
        await asyncio.sleep(0.01)
        told.append("beside")

    async def work() -> None:
        loop, run, over = asyncio.get_running_loop(), Run(), asyncio.Event()
        task = asyncio.create_task(beside(over))
        train._stop_on_signals(run)  # type: ignore[arg-type]
        loop.call_soon(signal.raise_signal, signal.SIGTERM)
        await run.told.wait()
        loop.call_soon(signal.raise_signal, again)
        try:
            await asyncio.Event().wait()
        finally:
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            over.set()
            await task
            told.append("all")

    ours = signal.signal(signal.SIGINT, before)  # type: ignore[arg-type]
    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(work())
    finally:
        signal.signal(signal.SIGINT, ours)
    assert told == ["beside", "all"]
