"""A training run outlives its command, also where no other machine takes over: killed and started again, it goes on
from what joined nodes have in memory."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.commands import Running, running
from tests.support.training.joined_nodes import joined, kill
from tests.support.training.runs import final, records, saved, train
from tests.support.training.small_job import write_job
from tests.support.training.training_step import furthest
from tllm.core.errors import INTERRUPTED, counted
from tllm.recipes.bench.processes import free_row
from tllm.training.job.job_file import read_job
from tllm.training.report.metrics import FILE, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each starts several processes that load torch

STEPS, SAVE_EVERY = 5000, 8
"""More steps than it takes, and after how many it is saved."""
GOES_ON = r"^goes on after step (\d+)(?: \((\d+) later (?:one is|ones are) done again\))?, from (.*); plan (\S+)"
SAVE, MEMORY = "the last save", "what the others have in memory"


def reach(command: Running, step: int) -> None:
    command.until(rf"^step +{step}/")


def test_killed_it_is_taken_up_from_memory_and_where_that_is_not_whole_from_a_save(tmp_path: Path) -> None:
    """First the command alone is killed, then a node with it: of three ranks any two have something to themselves."""
    config = dict(num_hidden_layers=4, initializer_range=0.02)  # as `train` begins a model
    keys: dict[str, Any] = dict(max_steps=STEPS, lr_scheduler_type="constant", dtype="float64")
    file = write_job(tmp_path, config, save_steps=SAVE_EVERY, **keys)
    alone, run = tmp_path / "alone", tmp_path / "run"
    port = str(free_row(1))
    words = ["train", str(file), "--nodes", "3", "--plan", "pp=3", "--threads", "1", "--cluster-host", "127.0.0.1"]
    words += ["--cluster-port", port, "--cluster-folder", str(tmp_path / "cluster"), "--replicas-of-coordinator", "1"]
    with ExitStack() as stack:
        first = stack.enter_context(running(*words))
        line = first.until(r"tllm join (\S+) --token (\S+)")
        nodes = [stack.enter_context(joined(tmp_path, *line.groups(), f"host-{i}", "--rejoin", "90")) for i in (1, 2)]
        reach(first, 12)
        kill(first.process)

        second = stack.enter_context(running(*words))
        again = second.until(GOES_ON)
        assert again[3] == MEMORY and int(again[1]) >= 11 and int(again[2] or 0) <= 1
        reach(second, 2 * SAVE_EVERY + 4)
        lost, living = nodes
        kill(second.process, lost.process)
        told = len(read_records(run / FILE))

        third = stack.enter_context(running(*words))
        again = third.until(GOES_ON)
        step, later = int(again[1]), int(again[2])
        assert again[3] == SAVE and again[4].startswith("pp=2")
        assert step % SAVE_EVERY == 0 and step + later == told, "it says what that costs"
        reach(third, told + SAVE_EVERY)
        code, errors = third.interrupt()
        assert code == INTERRUPTED and "Traceback" not in errors
        lost = counted(later, "step is", "steps are")
        assert f"no step is whole in memory: goes on after step {step}, {lost} lost" in errors
        assert "goes on with the 2 of 3 nodes that are here" in errors
        assert living.process.wait(60) == INTERRUPTED
    for node in ("host-1", "host-2"):
        said = (tmp_path / f"{node}.log").read_text()
        assert f"waits 90 s for it, or another of its cluster, to be at 127.0.0.1:{port} again" in said
    found = read_records(run / FILE)
    steps = len(found)
    assert [one.step for one in found] == list(range(1, steps + 1))
    undisturbed = replace(read_job(file).job, output_dir=str(alone), max_steps=steps)
    losses = [one.loss for one in records(train(undisturbed, "pp=1"))]
    assert max(abs(one.loss - loss) / loss for one, loss in zip(found, losses, strict=True)) < 1e-12
    off, name = furthest(saved(run, steps), final(alone))
    assert off < 1e-11, name
    starts = [int(re.findall(r'"step":(\d+)', line)[0]) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert starts[0] == 0 and starts == sorted(starts) and len(starts) >= 3
