"""`tllm train` with servers, over processes: stopped and gone on with under other plans, and with ranks that fail."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.commands import running, tllm
from tests.support.processes import descendants
from tests.support.runs import final
from tests.support.small_job import write_job
from tests.support.training import furthest
from tllm.train.metrics import read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # several processes that load torch, one after the other

STOPPED = 130


def test_servers_come_and_go_in_a_run_and_change_no_number(tmp_path: Path) -> None:
    """Ctrl-C under servers, then a plan without them, then other servers to the end: as if there had never been any."""
    (tmp_path / "plain").mkdir()
    options = dict(max_steps=24, save_steps=10, dtype="float64")
    plain, served = write_job(tmp_path / "plain", **options), write_job(tmp_path, **options)
    assert tllm("train", str(plain)).returncode == 0
    for plan, step in (("dp=2,servers=1", 3), ("dp=2", 12)):
        with running("train", str(served), "--plan", plan) as command:
            command.until(rf"^step +{step}/")
            assert command.interrupt() == (STOPPED, "")
    done = tllm("train", str(served), "--plan", "dp=2,servers=2")
    assert (done.returncode, done.stderr) == (0, "")
    steps = read_records(tmp_path / "run" / "metrics.jsonl")
    want = read_records(tmp_path / "plain" / "run" / "metrics.jsonl")
    assert [record.step for record in steps] == list(range(1, 25))
    assert max(abs(a.loss - b.loss) / b.loss for a, b in zip(steps, want, strict=True)) < 1e-12
    off, name = furthest(final(tmp_path / "run"), final(tmp_path / "plain" / "run"))
    assert off < 1e-10, name


@pytest.mark.parametrize("max_staleness", [0, -1])
@pytest.mark.parametrize(("rank", "words"), [(1, r"rank 1, layers \[0, 2\)"), (2, "rank 2, a server")])
def test_a_rank_that_is_killed_ends_the_run_and_is_named(
    rank: int, words: str, max_staleness: int, tmp_path: Path
) -> None:
    job = write_job(tmp_path, max_steps=100_000, save_steps=5, max_staleness=max_staleness)
    with running("train", str(job), "--plan", "dp=2,servers=1") as command:
        command.until(r"^step +8/")
        os.kill(sorted(descendants(command.process.pid))[rank], signal.SIGKILL)
        code, said = command.wait()
    assert code == 4 and re.search(rf"error: node local-{rank} \({words}\)", said), said
    assert (tmp_path / "run" / "step-5" / "saved.json").is_file() or list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_losses_that_explode_are_named(max_staleness: int, tmp_path: Path) -> None:
    job = write_job(tmp_path, learning_rate=1e9, max_staleness=max_staleness)
    done = tllm("train", str(job), "--plan", "dp=2,servers=1")
    assert done.returncode == 7, done.stderr
    *_, error, hint = done.stderr.splitlines()
    assert re.search(r"step \d+ went bad: .* on rank [01].* model\.layers\.\d\.\S+ on rank [01]", error), error
    assert hint.startswith("hint: nothing was updated in this step")
