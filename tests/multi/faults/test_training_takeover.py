"""The first machine of a training run is killed: another coordinates, and the run goes on to the weights that it would
have had."""

from __future__ import annotations

import re
import shutil
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.commands import Running, running, tllm
from tests.support.training.joined_nodes import JoinedNode, joined, kill, who_says
from tests.support.training.runs import final, records, saved, train
from tests.support.training.small_job import write_job
from tests.support.training.training_step import furthest
from tllm.core.errors import INTERRUPTED, counted
from tllm.recipes.bench.processes import free_row
from tllm.training.checkpoint import save_folders
from tllm.training.job.job_file import read_job
from tllm.training.report.metrics import FILE, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]  # each starts several processes that load torch

CONFIG = dict(num_hidden_layers=4, initializer_range=0.02)  # as `train` begins a model
SAVE_EVERY = 8
LONG: dict[str, Any] = dict(max_steps=5000, dtype="float64", lr_scheduler_type="constant", warmup_steps=0)
"""A run that ends when it is stopped; how long it was to be changes no step."""
GOES_ON = (
    r"^goes on(?: after [\d.]+ s)? after step (\d+)(?: \((\d+) later (?:one is|ones are) done again\))?, "
    r"from (.*); plan (\S+)"
)
SAVE, MEMORY = "the last save", "what the others have in memory"


def reach(command: Running, step: int) -> None:
    command.until(rf"^step +{step}/")


def begun(stack: ExitStack, folder: Path, job: Path, nodes: int, *more: str) -> tuple[Running, str, list[JoinedNode]]:
    """A run over so many machines, the first with a page at the address that is returned, once its state is replicated
    on three of them."""
    words = ["train", str(job), "--nodes", str(nodes), "--threads", "1", "--cluster-host", "127.0.0.1", "--page", "0"]
    words += [
        "--lost-after",
        "10",
    ]  # as nobody is deposed on a busy machine then, which an election would take for dead
    first = stack.enter_context(running(*words, *more))
    page = first.until(r"the run's page is at (\S+)")[1]
    line = first.until(r"tllm join (\S+) --token (\S+)")
    others = [
        stack.enter_context(joined(folder, line[1], line[2], f"host-{number}", "--page", "0"))
        for number in range(1, nodes)
    ]
    return first, page, others


def await_replicas(first: Running, page: str, count: int) -> None:
    until = time.monotonic() + 150
    while len((status(page)["replicas"] or {"nodes": ()})["nodes"]) < count:
        assert first.process.poll() is None and time.monotonic() < until
        time.sleep(0.05)


def status(page: str) -> dict[str, Any]:
    reply = httpx.get(f"{page}/v1/cluster", timeout=30)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def newest_save(run: Path) -> int:
    """The step of the newest save, also of one that is being written; 0 where there is none."""
    steps = (save_folders.STEP.fullmatch(path.name) for path in run.glob("step-*"))
    return max((int(step[1]) for step in steps if step), default=0)


def check_followed(heir: JoinedNode) -> None:
    """The run is shown where it is coordinated now: by its page and by `tllm status`."""
    _, shown = who_says([heir], r"^the run's page is at (http://\S+?:(\d+))$")
    seen = status(shown[1])
    assert seen["ready"] and sum(node["rank"] is not None for node in seen["nodes"]) == 2
    told = tllm("status", "--port", shown[2])
    assert told.returncode == 0 and "host-1" in told.stdout and "host-2" in told.stdout, told.stderr


def stopped(heir: JoinedNode) -> int:
    """Stop the run where it is coordinated, as a user does; after which step it left."""
    heir.process.send_signal(signal.SIGINT)
    _, left = who_says([heir], r"^left after step (\d+) of 5000")
    assert "saving, then ending the run" in heir.said()
    return int(left[1])


def check_stopped(job: Path, steps: int) -> None:
    """The run was saved after this step, and has each step once with the losses of the undisturbed run, and its
    weights."""
    run = job.parent / "run"
    alone = replace(read_job(job).job, output_dir=str(job.parent / "alone"), max_steps=steps)
    losses = [one.loss for one in records(train(alone, "pp=1"))]
    found = read_records(run / FILE)
    assert [one.step for one in found] == list(range(1, steps + 1))
    assert max(abs(one.loss - loss) / loss for one, loss in zip(found, losses, strict=True)) < 1e-12
    off, name = furthest(saved(run, steps), final(job.parent / "alone"))
    assert off < 1e-11, name


@pytest.mark.soak  # the next has a folder for each machine, the last one folder for all
def test_another_machine_goes_on_with_the_run(tmp_path: Path) -> None:
    """It is followed where it coordinates now: on its terminal, its page and by `tllm status`."""
    job = write_job(tmp_path, CONFIG, save_steps=SAVE_EVERY, **LONG)
    with ExitStack() as stack:
        first, page, nodes = begun(stack, tmp_path, job, 3, "--plan", "pp=3")
        await_replicas(first, page, 3)
        reach(first, 12)
        began = time.monotonic()
        kill(first.process)
        heir, again = who_says(nodes, GOES_ON)
        print(f"from the kill to the run going on: {time.monotonic() - began:.1f} s")
        assert again[3] == MEMORY and int(again[1]) >= 11 and int(again[2] or 0) <= 1
        assert again[4].startswith("pp=2")
        check_followed(heir)
        left = stopped(heir)
        assert left > int(again[1])
        assert [node.process.wait(60) for node in nodes] == [INTERRUPTED] * 2
        assert f"metrics and saves go on in {tmp_path / 'run'}" in heir.said()
        assert "Traceback" not in "".join(node.said() for node in nodes)
    check_stopped(job, left)
    starts = re.findall(r'"step":(\d+)', (tmp_path / "run" / "starts.jsonl").read_text())
    assert [int(step) for step in starts] == [0, int(again[1])]


def test_without_a_shared_folder_it_goes_on_in_one_of_its_own(tmp_path: Path) -> None:
    """Its rows are there by the same path. It says where the metrics of the steps before are."""
    places = [tmp_path / name for name in ("first", "host-1", "host-2")]
    for place in places:
        place.mkdir()
        names: dict[str, Any] = dict(output_dir="run", train_files=["pages.jsonl"], config_name="config.json")
        job = write_job(place, CONFIG, save_steps=SAVE_EVERY, **LONG, **names)
    words = ["train", "job.toml", "--nodes", "3", "--threads", "1", "--cluster-host", "127.0.0.1", "--page", "0"]
    words += ["--lost-after", "10"]
    with ExitStack() as stack:
        first = stack.enter_context(running(*words, "--plan", "pp=3", host=("env", "-C", str(places[0]))))
        page = first.until(r"the run's page is at (\S+)")[1]
        address, token = first.until(r"tllm join (\S+) --token (\S+)").groups()
        nodes = [
            stack.enter_context(joined(tmp_path, address, token, place.name, "--page", "0", cwd=place))
            for place in places[1:]
        ]
        await_replicas(first, page, 3)
        reach(first, 12)
        kill(first.process)
        heir, again = who_says(nodes, GOES_ON)
        assert again[3] == MEMORY
        check_followed(heir)
        left = stopped(heir)
        assert left > int(again[1])
        assert [node.process.wait(60) for node in nodes] == [INTERRUPTED] * 2
        own = tmp_path / heir.name / "run"
        told = re.search(
            rf"metrics and saves go to {own} on \S+ from now on; metrics of steps up to (\d+) are in \S+:(\S+)",
            heir.said(),
        )
        assert told is not None and told[2] == str(places[0] / "run"), heir.said()
        assert "# the coordinator before" in (own / "job.toml").read_text() and (own / "starts.jsonl").is_file()
    found = read_records(places[0] / "run" / FILE)[: int(again[1])] + read_records(own / FILE)
    assert [one.step for one in found] == list(range(1, left + 1))
    alone = replace(
        read_job(job).job,
        output_dir=str(tmp_path / "alone"),
        train_files=(str(places[0] / "pages.jsonl"),),
        config_name=str(places[0] / "config.json"),
        max_steps=left,
    )
    train(alone, "pp=1")
    for node in nodes:  # each has its own part of the save
        part = tmp_path / node.name / "run" / f"step-{left}"
        shutil.copytree(part, tmp_path / "whole" / part.name, dirs_exist_ok=True)
    off, name = furthest(saved(tmp_path / "whole", left), final(tmp_path / "alone"))
    assert off < 1e-11, name


@pytest.mark.soak  # `test_faults` kills a node while it saves, `test_checkpoint_kill` a process in the midst of it
def test_killed_while_it_saves(tmp_path: Path) -> None:
    """What is left of the save is removed, and the step is saved by those that are left."""
    job = write_job(tmp_path, CONFIG, save_steps=SAVE_EVERY, **LONG)
    run = tmp_path / "run"
    with ExitStack() as stack:
        first, page, nodes = begun(stack, tmp_path, job, 3, "--plan", "pp=3")
        await_replicas(first, page, 3)
        before = newest_save(run)
        while (step := newest_save(run)) == before:
            assert first.process.poll() is None
        kill(first.process)
        heir, again = who_says(nodes, GOES_ON)
        print(f"killed as the save of step {step} was there; goes on after step {again[1]}")
        assert again[3] == MEMORY and int(again[1]) >= step - 1
        who_says([heir], r"^saved step \d+: ")
        left = stopped(heir)
        assert [node.process.wait(60) for node in nodes] == [INTERRUPTED] * 2
        assert "Traceback" not in "".join(node.said() for node in nodes)
    assert not list(run.glob("*.tmp")) and not list(run.glob("*.gone"))
    check_stopped(job, left)


@pytest.mark.soak  # `test_training_restart` goes back to a save where no step is whole in memory
def test_two_of_five_are_killed_at_once(tmp_path: Path) -> None:
    """With five replicas any two may be lost. What only these two held is in no memory: the run goes back to a save."""
    job = write_job(tmp_path, CONFIG | {"num_hidden_layers": 5}, save_steps=SAVE_EVERY, **LONG)
    with ExitStack() as stack:
        first, page, nodes = begun(stack, tmp_path, job, 5, "--plan", "pp=5", "--replicas-of-coordinator", "5")
        await_replicas(first, page, 5)
        (keeper,) = [node["node"] for node in status(page)["nodes"] if node["rank"] == 1]  # of what rank 0 has
        first.until(r"^saved step (\d+)")
        kill(first.process, *(node.process for node in nodes if node.name == keeper))
        living = [node for node in nodes if node.name != keeper]
        heir, again = who_says(living, GOES_ON)
        step = int(again[1])
        assert again[3] == SAVE and step % SAVE_EVERY == 0 and step > 0 and again[4].startswith("pp=3")
        if again[2]:
            lost = counted(int(again[2]), "step is", "steps are")
            assert f"no step is whole in memory: goes on after step {step}, {lost} lost" in heir.said()
        left = stopped(heir)
        assert left > step
        assert [node.process.wait(60) for node in living] == [INTERRUPTED] * 3
        assert "Traceback" not in "".join(node.said() for node in living)
    check_stopped(job, left)


@pytest.mark.soak  # `test_rolling_restart` and `test_hosts` have it come back while it serves
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stood still"])
def test_the_first_machine_comes_back_as_a_node_and_the_run_is_stopped_where_it_is_coordinated(
    tmp_path: Path, is_killed: bool
) -> None:
    """By the same command once more, or by itself where it was only deposed."""
    job = write_job(tmp_path, CONFIG, save_steps=1000, **LONG)
    cluster = ["--cluster-port", str(free_row(1)), "--cluster-folder", str(tmp_path / "cluster"), "--plan", "pp=3"]
    with ExitStack() as stack:
        first, page, nodes = begun(stack, tmp_path, job, 3, *cluster)
        await_replicas(first, page, 3)
        reach(first, 5)
        if is_killed:
            kill(first.process)
        else:
            first.process.send_signal(signal.SIGSTOP)
        heir, again = who_says(nodes, GOES_ON)
        assert again[4].startswith("pp=2")
        words = ["train", str(job), "--nodes", "3", "--threads", "1", "--cluster-host", "127.0.0.1", *cluster]
        back = stack.enter_context(running(*words)) if is_killed else first
        back.process.send_signal(signal.SIGCONT)
        who_says([heir], rf"^goes on.* after step \d+, from {MEMORY}; plan pp=3", 90)
        left = stopped(heir)
        code, errors = back.wait()
        assert code == INTERRUPTED and "runs, coordinated at 127.0.0.1:" in errors, errors
        assert is_killed or "this process coordinates no more" in errors
        assert [node.process.wait(60) for node in nodes] == [INTERRUPTED] * 2
        assert "Traceback" not in errors + "".join(node.said() for node in nodes)
    check_stopped(job, left)
