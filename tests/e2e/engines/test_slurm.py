"""A real Slurm with the scripts of the guide: losses and ids of one machine, though tasks die and jobs are requeued."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.page import Block, read
from tests.house.tree import ROOT
from tests.support.cluster.commands import tllm
from tests.support.cluster.slurm import Slurm, slurm, why_not
from tests.support.training.small_job import write_job
from tllm.recipes.bench.processes import free_row
from tllm.training.report.metrics import read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.skipif(bool(why_not()), reason=why_not())]

KEY = "a-key-that-nobody-guesses"


def script(name: str, folder: Path) -> Path:
    """A script of the guide, written where its reader would."""
    blocks = [one for one in read(ROOT / "docs" / "guides" / "slurm.md") if isinstance(one, Block)]
    (text,) = (block.text for block in blocks if block.words.get("file") == name)
    file = folder / name
    file.write_text(text)
    return file


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Slurm]:
    """Two machines; jobs find this tree's `tllm`, and a home of their own."""
    (tmp_path / ".tllm-api-key").write_text(KEY)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    source = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    with slurm(tmp_path, 2, dict(HOME=str(tmp_path), PATH=path, PYTHONPATH=source, OMP_NUM_THREADS="1")) as made:
        yield made


def losses(run: Path) -> dict[int, float]:
    return {record.step: record.loss for record in read_records(run / "metrics.jsonl")}


def until_step(lab: Slurm, run: Path, step: int, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not (run / "metrics.jsonl").exists() or max(losses(run), default=0) < step:
        assert time.monotonic() < end, lab.told()
        time.sleep(0.1)


def tasks_of(number: int) -> list[int]:
    """The processes of this machine that are this task of `tllm`."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words, environment = (place / "cmdline").read_bytes(), (place / "environ").read_bytes()
        except OSError:
            continue
        if b"\0SLURM_PROCID=%d\0" % number in environment and b"/tllm\0" in words:
            found.append(int(place.name))
    return found


@pytest.mark.soak  # as for Ray: `test_train` stops ranks that Slurm started, and goes on
def test_a_run_is_requeued_and_outlives_a_task_with_the_losses_of_one_machine(lab: Slurm, tmp_path: Path) -> None:
    """Told to stop, it saves, is requeued and goes on; then a task is killed, and it goes on with the other."""
    job = write_job(tmp_path, plan="dp=2", deterministic=True, max_steps=80, save_steps=1000, learning_rate=1e-3)
    alone = tllm("train", str(job), "--local", "2", "--set", f"output_dir={tmp_path / 'alone'}", "--quiet")
    assert alone.returncode == 0, alone.stderr
    run, output = tmp_path / "run", tmp_path / "train.out"
    number = lab.submit(script("train.sh", tmp_path), "--chdir", str(tmp_path), "--output", str(output))
    until_step(lab, run, 5)
    lab("scancel", "--signal=TERM", str(number))
    lab.until(number, "PENDING", seconds=120)
    lab.start_now(number)
    (saved,) = run.glob("step-*")
    stopped = int(saved.name.removeprefix("step-"))
    assert 5 <= stopped < 60
    until_step(lab, run, stopped + 5)
    assert lab.state(number)["Restarts"] == "1"
    (task,) = tasks_of(1)
    os.kill(task, signal.SIGKILL)
    killed = max(losses(run))
    assert killed < 75
    ended = lab.until(number, "COMPLETED", "FAILED", seconds=120)
    said = output.read_text()
    assert (run / "final").is_dir(), said
    assert "task-1" in said
    assert losses(run) == losses(tmp_path / "alone")
    assert not list(run.glob(".join*"))
    assert ended["JobState"] == "FAILED"  # by the exit code of the task that was killed


@pytest.mark.soak
def test_a_run_is_preempted_and_goes_on_with_fewer_machines(lab: Slurm, tmp_path: Path) -> None:
    """It has both machines until an urgent job takes one, saves, and goes on with the other one to the same losses."""
    job = write_job(tmp_path, max_steps=100, save_steps=1000, learning_rate=1e-3)
    thread = ("--threads", "1")  # two that meet after each operation are slow where others compute, too
    alone = tllm("train", str(job), *thread, "--set", f"output_dir={tmp_path / 'alone'}", "--quiet")
    assert alone.returncode == 0, alone.stderr
    run, output = tmp_path / "run", tmp_path / "train.out"
    words = ["--chdir", str(tmp_path), "--output", str(output), "--nodes=1-2", str(script("train.sh", tmp_path))]
    number = int(lab("sbatch", "--parsable", *words, *thread))
    until_step(lab, run, 5)
    assert lab.state(number)["NumNodes"] == "2"
    (tmp_path / "urgent.sh").write_text("#!/bin/bash\nsleep 600\n")
    urgent = lab.submit(tmp_path / "urgent.sh", "--partition=urgent", "--nodes=1", "--chdir", str(tmp_path))
    lab.until(urgent, "RUNNING", seconds=120)
    (saved,) = run.glob("step-*")
    stopped = int(saved.name.removeprefix("step-"))
    assert 5 <= stopped < 100
    lab.start_now(number)
    again = lab.state(number)
    assert (again["NumNodes"], again["Restarts"]) == ("1", "1")
    assert lab.until(number, "COMPLETED", "FAILED", seconds=120)["JobState"] == "COMPLETED", output.read_text()
    assert lab.state(urgent)["JobState"] == "RUNNING"
    found, wanted = losses(run), losses(tmp_path / "alone")
    assert found.keys() == wanted.keys()
    assert all(abs(found[step] - wanted[step]) < 1e-3 for step in wanted)


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60)


def until_ready(lab: Slurm, url: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            ask(f"{url}/health/ready").close()
            return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < end, lab.told()
            time.sleep(0.2)


def test_a_stream_outlives_a_task(lab: Slurm, folder: Path, tmp_path: Path) -> None:
    words = ["--prompt-ids", "1,2,3", "--max-tokens", "200", "--ignore-eos", "--json"]
    whole = json.loads(tllm("generate", str(folder), *words).stdout)["token_ids"]
    port, output = free_row(1), tmp_path / "serve.out"
    url = f"http://127.0.0.1:{port}"
    lab.environment |= dict(MODEL=str(folder), PORT=str(port))
    words = ["--chdir", str(tmp_path), "--output", str(output), str(script("serve.sh", tmp_path)), "--plan", "pp=2"]
    number = int(lab("sbatch", "--parsable", *words))
    until_ready(lab, url)
    with ask(f"{url}/v1/cluster") as reply:
        nodes = {node["node"]: node for node in json.load(reply)["nodes"]}
    assert nodes["task-1"]["labels"] == {"engine": "slurm", "job": str(number), "task": "1"}
    assert KEY not in lab("scontrol", "show", "job", str(number))
    body = dict(prompt=[1, 2, 3], max_tokens=200, temperature=0, ignore_eos=True, return_token_ids=True, stream=True)
    ids: list[int] = []
    with ask(f"{url}/v1/completions", body) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
                if nodes and len(ids) >= 20:
                    os.kill(nodes["task-1"]["pid"], signal.SIGKILL)
                    nodes = {}
    assert ids == whole
    lab("scancel", str(number))
    lab.until(number, "CANCELLED", seconds=120)
    assert not list(tmp_path.glob(".join*"))


def test_tllm_alone_in_a_script_says_that_srun_is_missing(lab: Slurm, folder: Path, tmp_path: Path) -> None:
    file, output = tmp_path / "alone.sh", tmp_path / "alone.out"
    file.write_text(f"#!/bin/bash\n#SBATCH --nodes=2\ntllm serve {folder} --on slurm\n")
    number = lab.submit(file, "--chdir", str(tmp_path), "--output", str(output))
    assert lab.until(number, "FAILED", seconds=120)["ExitCode"] == "2:0"
    assert re.search(rf"error: job {number} of Slurm has started this process, and no srun in it", output.read_text())
