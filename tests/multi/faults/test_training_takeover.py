"""The first machine of a training run is killed: another coordinates, and the run goes on to the weights that it would
have had."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.commands import Running, running, tllm
from tests.support.training.joined_nodes import JoinedNode, joined, kill, who_says
from tests.support.training.runs import final, records, train
from tests.support.training.small_job import write_job
from tests.support.training.training_step import furthest
from tllm.recipes.bench.processes import free_row
from tllm.training.job.job_file import read_job
from tllm.training.report.metrics import FILE, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # each starts several processes that load torch

CONFIG = dict(num_hidden_layers=4, initializer_range=0.02)  # as `train` begins a model
STEPS, SAVE_EVERY = 60, 8
GOES_ON = (
    r"^goes on(?: after [\d.]+ s)? after step (\d+)(?: \((\d+) later ones are done again\))?, from (.*); plan (\S+)"
)
SAVE, MEMORY = "the last save", "what the others have in memory"


def reach(command: Running, step: int) -> None:
    command.until(rf"^step +{step}/")


def begun(stack: ExitStack, folder: Path, job: Path, nodes: int, *more: str) -> tuple[Running, str, list[JoinedNode]]:
    """A run over so many machines, the first with a page at the address that is returned, once its state is replicated
    on three of them."""
    words = ["train", str(job), "--nodes", str(nodes), "--threads", "1", "--cluster-host", "127.0.0.1", "--page", "0"]
    first = stack.enter_context(running(*words, *more))
    page = first.until(r"the run's page is at (\S+)")[1]
    line = first.until(r"tllm join (\S+) --token (\S+)")
    others = [
        stack.enter_context(joined(folder, line[1], line[2], f"host-{number}", "--page", "0"))
        for number in range(1, nodes)
    ]
    return first, page, others


def await_replicas(page: str, count: int) -> None:
    until = time.monotonic() + 60
    while len((status(page)["replicas"] or {"nodes": ()})["nodes"]) < count:
        assert time.monotonic() < until, status(page)
        time.sleep(0.05)


def status(page: str) -> dict[str, Any]:
    reply = httpx.get(f"{page}/v1/cluster", timeout=30)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def check(job: Path, run: Path, alone: Path) -> None:
    """Each step once, with the losses and the weights of the run that nothing disturbed."""
    losses = [one.loss for one in records(train(replace(read_job(job).job, output_dir=str(alone)), "pp=1"))]
    found = read_records(run / FILE)
    assert [one.step for one in found] == list(range(1, STEPS + 1))
    assert max(abs(one.loss - loss) / loss for one, loss in zip(found, losses, strict=True)) < 1e-12
    off, name = furthest(final(run), final(alone))
    assert off < 1e-11, name


def test_another_machine_goes_on_with_the_run(tmp_path: Path) -> None:
    """It is followed where it coordinates now: on its terminal, its page and by `tllm status`."""
    job = write_job(tmp_path, CONFIG, max_steps=STEPS, save_steps=SAVE_EVERY, dtype="float64")
    with ExitStack() as stack:
        first, page, nodes = begun(stack, tmp_path, job, 3, "--plan", "pp=3")
        await_replicas(page, 3)
        reach(first, 12)
        began = time.monotonic()
        kill(first.process)
        heir, again = who_says(nodes, GOES_ON)
        print(f"from the kill to the run going on: {time.monotonic() - began:.1f} s")
        assert again[3] == MEMORY and int(again[1]) >= 11 and int(again[2] or 0) <= 1
        assert again[4].startswith("pp=2")
        _, shown = who_says([heir], r"^the run's page is at (http://\S+?:(\d+))$")
        seen = status(shown[1])
        assert seen["ready"] and sum(node["rank"] is not None for node in seen["nodes"]) == 2
        told = tllm("status", "--port", shown[2])
        assert told.returncode == 0 and "host-1" in told.stdout and "host-2" in told.stdout, told.stderr
        assert [node.process.wait(120) for node in nodes] == [0, 0]
        assert "done after 60 steps" in heir.said()
        assert f"metrics and saves go on in {tmp_path / 'run'}" in heir.said()
        assert "Traceback" not in "".join(node.said() for node in nodes)
    check(job, tmp_path / "run", tmp_path / "alone")
    starts = re.findall(r'"step":(\d+)', (tmp_path / "run" / "starts.jsonl").read_text())
    assert [int(step) for step in starts] == [0, int(again[1])]


def test_killed_while_it_saves(tmp_path: Path) -> None:
    """What is left of the save is removed, and the step is saved by those that are left."""
    job = write_job(tmp_path, CONFIG, max_steps=STEPS, save_steps=SAVE_EVERY, dtype="float64")
    run = tmp_path / "run"
    with ExitStack() as stack:
        first, page, nodes = begun(stack, tmp_path, job, 3, "--plan", "pp=3")
        await_replicas(page, 3)
        reach(first, 2 * SAVE_EVERY - 1)
        while not (saving := sorted(run.glob(f"*{2 * SAVE_EVERY}*"))):
            assert first.process.poll() is None
        kill(first.process)
        heir, again = who_says(nodes, GOES_ON)
        print(f"killed as {', '.join(path.name for path in saving)} was there; goes on after step {again[1]}")
        assert again[3] == MEMORY and int(again[1]) >= 2 * SAVE_EVERY - 1
        assert [node.process.wait(120) for node in nodes] == [0, 0]
        assert "Traceback" not in "".join(node.said() for node in nodes)
        assert f"saved step {3 * SAVE_EVERY}: " in heir.said()
    assert not list(run.glob("*tmp*")) and not list(run.glob("*.unfinished"))
    check(job, run, tmp_path / "alone")


def test_two_of_five_are_killed_at_once_and_the_first_comes_back(tmp_path: Path) -> None:
    """With five replicas any two may be lost. What only these two held is in no memory: the run goes back to the last
    save. The command of the first machine, started again, joins as a node and gets a rank."""
    config = {**CONFIG, "num_hidden_layers": 5}
    job = write_job(tmp_path, config, max_steps=STEPS, save_steps=SAVE_EVERY, dtype="float64")
    words = ["--plan", "pp=5", "--replicas-of-coordinator", "5", "--cluster-port", str(free_row(1))]
    words += ["--cluster-folder", str(tmp_path / "cluster")]
    with ExitStack() as stack:
        first, page, nodes = begun(stack, tmp_path, job, 5, *words)
        await_replicas(page, 5)
        reach(first, 2 * SAVE_EVERY + 2)
        kill(first.process, nodes[0].process)
        living = nodes[1:]
        heir, again = who_says(living, GOES_ON)
        assert again[3] == SAVE and int(again[1]) == 2 * SAVE_EVERY and again[4].startswith("pp=3")
        words = ["train", str(job), "--nodes", "5", "--threads", "1", "--cluster-host", "127.0.0.1", *words]
        back = stack.enter_context(running(*words))
        who_says([heir], rf"^goes on.* after step \d+, from {MEMORY}; plan pp=4", 90)
        code, errors = back.wait()
        assert code == 0 and "coordinated at 127.0.0.1:" in errors, errors
        assert [node.process.wait(60) for node in living] == [0, 0, 0]
        assert "Traceback" not in "".join(node.said() for node in living)
    check(job, tmp_path / "run", tmp_path / "alone")
