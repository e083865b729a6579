"""A real torchrun on two machines: a run goes on though one process, and then one machine, is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.support.cluster.commands import tllm
from tests.support.cluster.processes import descendants
from tests.support.training.small_job import write_job
from tllm.recipes.bench.processes import free_row
from tllm.training.report.metrics import StepRecord, read_records

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(300)]


def agent(number: int, port: int, log: Path, *words: str) -> subprocess.Popen[bytes]:
    """What is started on one of two machines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
    command += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=1"]
    command += ["--monitor-interval=0.1", "-m", "tllm.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)


def rank_of(process: subprocess.Popen[bytes]) -> int:
    """The process that an agent has started."""
    return next(
        pid
        for pid in descendants(process.pid)
        if b"tllm.cli" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != process.pid
    )


def records(run: Path) -> list[StepRecord]:
    file = run / "metrics.jsonl"
    return read_records(file) if file.exists() else []


def losses(run: Path) -> dict[int, float]:
    return {record.step: record.loss for record in records(run)}


def taken_together(run: Path) -> list[int]:
    """Steps that several ranks have taken: who is alone sends nothing."""
    return [record.step for record in records(run) if record.bytes_sent]


def until(holds: Callable[[], object], log: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def stands_still(run: Path) -> int:
    """The last step, once none has come for half a second: ranks wait in the middle of the next one."""
    done, last = -1, len(losses(run))
    while done < last:
        time.sleep(0.5)
        done, last = last, len(losses(run))
    return last


def test_a_run_goes_on_though_a_process_and_then_a_machine_is_lost(tmp_path: Path) -> None:
    """torchrun starts the process again, which joins and takes steps; nothing else is started again, and the losses are
    undisturbed. The process is lost in the middle of a step, as the other one waits for its gradients.
    """
    keys = dict(plan="dp=2", deterministic=True, save_steps=10**6, learning_rate=1e-3, lr_scheduler_type="constant")
    job = write_job(tmp_path, max_steps=10**6, **keys)
    run, port, log = tmp_path / "run", free_row(1), tmp_path / "first.log"
    with ExitStack() as stack:
        # Products of few rows have the same bits with as many threads alone.
        words = ("train", str(job), "--on-loss", "replan", "--threads", "1")
        first, second = (agent(i, port, (log, tmp_path / "second.log")[i], *words) for i in range(2))
        for process in (first, second):
            stack.callback(process.wait)
            stack.callback(process.kill)
        until(lambda: len(losses(run)) >= 5, log)
        lost = rank_of(second)
        os.kill(lost, signal.SIGSTOP)
        before = stands_still(run)
        os.kill(lost, signal.SIGKILL)
        until(lambda: re.search(r"goes on after .*layers=2$", log.read_text(), re.MULTILINE), log)
        until(lambda: re.search(r"goes on after .*dp=2$", log.read_text(), re.MULTILINE), log)
        until(lambda: len([step for step in taken_together(run) if step > before]) >= 3, log)
        assert rank_of(second) != lost, "another process of the same agent"
        machine = [second.pid, *descendants(second.pid)]
        for pid in machine:
            os.kill(pid, signal.SIGKILL)
        done = len(losses(run))
        until(lambda: len(losses(run)) >= done + 5, log)
        os.kill(rank_of(first), signal.SIGTERM)
        until(lambda: re.search(r"left after step \d+", log.read_text()), log)
        assert log.read_text().count("bringing up 2 ranks") == 1, "the first has lived through it"
    found = losses(run)
    last, place = max(found), tmp_path / "alone"
    alone = tllm(
        "train",
        str(job),
        "--local",
        "2",
        "--threads",
        "1",
        "--set",
        f"output_dir={place}",
        "--set",
        f"max_steps={last}",
        "--quiet",
    )
    assert alone.returncode == 0, alone.stderr
    assert found == losses(place)
