"""`tllm train` with servers, over processes: stopped and gone on with, and with ranks that fail."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.commands import but_for_late, running, tllm
from tests.support.cluster.processes import workers_of
from tests.support.training.runs import final
from tests.support.training.small_job import write_job
from tests.support.training.training_step import furthest
from tllm.training.report.metrics import read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # several processes that load torch, one after the other

STOPPED = 130


def test_ctrl_c_and_other_servers_change_no_number(tmp_path: Path) -> None:
    """As one rank alone would have done it, in as many steps as it came to."""
    (tmp_path / "plain").mkdir()
    options: dict[str, Any] = dict(max_steps=100_000, save_steps=10, dtype="float64", lr_scheduler_type="constant")
    plain, served = write_job(tmp_path / "plain", **options), write_job(tmp_path, **options)
    with running("train", str(served), "--plan", "dp=2,servers=1") as command:
        command.until("^step +3/")
        code, said = command.interrupt()
    assert (code, but_for_late(said)) == (STOPPED, "")
    steps = read_records(tmp_path / "run" / "metrics.jsonl")[-1].step + 6
    done = tllm("train", str(served), "--plan", "dp=3:1,servers=2", "--set", f"max_steps={steps}")
    assert (done.returncode, but_for_late(done.stderr)) == (0, "")
    assert tllm("train", str(plain), "--threads", "1", "--set", f"max_steps={steps}").returncode == 0
    got, want = (read_records(folder / "run" / "metrics.jsonl") for folder in (tmp_path, tmp_path / "plain"))
    assert [record.step for record in got] == list(range(1, steps + 1))
    assert max(abs(a.loss - b.loss) / b.loss for a, b in zip(got, want, strict=True)) < 1e-12
    off, name = furthest(final(tmp_path / "run"), final(tmp_path / "plain" / "run"))
    assert off < 1e-10, name


@pytest.mark.parametrize(
    ("rank", "words", "max_staleness"), [(1, r"rank 1, layers \[0, 2\)", -1), (2, "rank 2, a server", 0)]
)
def test_a_rank_that_is_killed_ends_the_run_and_is_named(
    rank: int, words: str, max_staleness: int, tmp_path: Path
) -> None:
    job = write_job(tmp_path, max_steps=100_000, save_steps=5, max_staleness=max_staleness)
    with running("train", str(job), "--plan", "dp=2,servers=1", "--on-loss", "end") as command:
        command.until(r"^step +8/")
        os.kill(workers_of(command.process.pid)[rank], signal.SIGKILL)
        code, said = command.wait()
    assert code == 4 and re.search(rf"error: node local-{rank} \({words}\)", said), said


def test_losses_that_explode_are_named(tmp_path: Path) -> None:
    job = write_job(tmp_path, learning_rate=1e9, max_staleness=1)
    done = tllm("train", str(job), "--plan", "dp=2,servers=1")
    assert done.returncode == 7, done.stderr
    *_, error, hint = done.stderr.splitlines()
    assert re.search(r"step \d+ went bad: .* on rank [01].* model\.\S+ on rank [01]", error), error
    assert hint.startswith("hint: nothing was updated in this step")
