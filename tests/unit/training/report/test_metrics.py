"""Metrics: a line a step, none twice after a restart, and nothing that a full disk or a missing package can break."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from tllm.core.errors import ConfigError
from tllm.training.report import metrics
from tllm.training.report.console import show_bytes, show_seconds, step_line
from tllm.training.report.metrics import FILE, MetricsFile, StepRecord, last_step, read_records, sinks


def record(step: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1.25,
        learning_rate=3e-4,
        tokens=4096,
        seconds=0.5,
        tokens_per_second=8192.0,
        mfu=0.31,
        bubble=0.125,
        memory=1_500_000_000,
        bytes_sent=2_000_000,
    )


def steps(folder: Path) -> list[int]:
    return [one.step for one in read_records(folder / FILE)]


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in (1, 2):
        file.write(record(step))
        lines = (tmp_path / FILE).read_text().splitlines()
        assert json.loads(lines[-1])["step"] == len(lines) == step
    assert read_records(tmp_path / FILE)[1] == record(2)
    file.close()


@pytest.mark.parametrize("tail", ["", '{"step": 8, "lo', '{"step": 8}', "\n", "[1]\n", '{"step": 3}\n'])
@pytest.mark.parametrize("done", [0, 3, 5, 7, 9])
def test_no_step_twice_after_a_restart(tmp_path: Path, done: int, tail: str) -> None:
    file = MetricsFile(tmp_path)
    for step in range(1, 8):
        file.write(record(step, loss=9.0))
    file.close()
    with (tmp_path / FILE).open("a") as add:
        add.write(tail)
    again = MetricsFile(tmp_path, done)
    kept = steps(tmp_path)
    assert kept == list(range(1, min(done, 7) + 1))
    for step in range(done + 1, 12):
        again.write(record(step))
    again.close()
    found = steps(tmp_path)
    assert found == sorted(set(found)) == kept + list(range(done + 1, 12))


@pytest.mark.parametrize("tail", ["", '{"step": 8, "lo', '{"step": 8}', "{}\n"])
@pytest.mark.parametrize("nbytes", [380, 64 * 1024], ids=["few", "many"])
def test_the_last_step_is_known_from_the_end_of_the_file(
    tmp_path: Path, tail: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a line those bytes begin."""
    assert last_step(tmp_path) == 0
    file = MetricsFile(tmp_path)
    assert last_step(tmp_path) == 0
    for step in range(1, 8):
        file.write(record(step))
    file.close()
    with (tmp_path / FILE).open("a") as add:
        add.write(tail)
    for more in range(0, 60, 7):
        monkeypatch.setattr(metrics, "TAIL_BYTES", nbytes + more)
        assert last_step(tmp_path) == 7


def test_a_full_disk_loses_lines_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = MetricsFile(tmp_path)
    file.write(record(1))
    size = os.path.getsize(tmp_path / FILE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, hard))
    try:
        file.write(record(2))
        file.write(record(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (file.lost, file.error) == (2, "File too large")
    file.write(record(4))
    assert steps(tmp_path) == [1, 4], "no line is torn"
    file.close()
    path = tmp_path / FILE
    assert [one.getMessage() for one in caplog.records] == [
        f"cannot write {path}: File too large; the run goes on, and lines are left out until there is room",
        f"{path} lacks 2 lines that found no room; there is room again",
    ]


def test_tensorboard_is_asked_for_and_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        sinks(tmp_path, ("tensorboard",))
    assert "pip install tensorboard" in caught.value.hint
    with pytest.raises(ConfigError, match="wandb"):
        sinks(tmp_path, ("wandb",))
    (file,) = sinks(tmp_path, ("none",))
    file.close()


def test_tensorboard_gets_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "tensorboard"), 5)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

        def close(self) -> None:
            seen.append(("closed", 0, 0))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    both = sinks(tmp_path, ("tensorboard",), done=4)
    for sink in both:
        sink.write(record(5))
        sink.close()
    assert ("train/loss", 2.5, 5) in seen
    assert ("train/bytes_sent", 2_000_000, 5) in seen
    assert not [name for name, _, _ in seen if name == "training/step"]
    assert seen[-1][0] == "closed"
    assert steps(tmp_path) == [5]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        MetricsFile(tmp_path / "none")


def test_the_line_for_people() -> None:
    line = step_line(record(30), 500, average_seconds=0.5)
    assert line == (
        "step  30/500  loss   2.5000  norm    1.250  lr 3.00e-04      8,192 tok/s  "
        "mfu 31.0 %  mem 1.5 GB  bubble 12.5 %  sent 2.0 MB  left 3m55s"
    )
    bare = StepRecord(step=7, loss=1, grad_norm=2, learning_rate=0.1, tokens=1, seconds=1.0, tokens_per_second=123456.0)
    assert step_line(bare, 9) == "step 7/9  loss   1.0000  norm    2.000  lr 1.00e-01    123,456 tok/s"
    assert step_line(bare, 9, room=60) == "step 7/9  loss   1.0000  norm    2.000    123,456 tok/s"
    assert step_line(record(30), 500, 0.5, room=80) == (
        "step  30/500  loss   2.5000  norm    1.250      8,192 tok/s  left 3m55s"
    )
    assert step_line(record(30), 500, 0.5, room=30) == "step  30/500  loss   2.5000"
    assert step_line(record(30), 500, 0.5, room=3) == "step  30/500"
    told = msgspec.structs.replace(bare, metrics={"rewards/margins": 0.25, "logps/chosen": -9.0}, eval_loss=0.6)
    assert step_line(told, 9).startswith("step 7/9  loss   1.0000  margin   0.250  eval 0.6000  norm    2.000")
    taught = msgspec.structs.replace(bare, metrics={"divergence": 1.5, "teacher_bytes_per_token": 912.4})
    assert "  divergence   1.500  teacher 912 B/tok  norm" in step_line(taught, 9)
    beside = msgspec.structs.replace(bare, metrics={"divergence": 1.5, "teacher_bytes_per_token": 0.0})
    assert "teacher" not in step_line(beside, 9), "nothing crosses a wire"
    assert [show_bytes(n) for n in (0, 999, 1000, 2.5e15)] == ["0 B", "999 B", "1.0 KB", "2500.0 TB"]
    assert [show_seconds(s) for s in (-1, 59.4, 60, 7500)] == ["0s", "59s", "1m00s", "2h05m"]
