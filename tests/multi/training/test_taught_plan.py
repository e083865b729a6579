"""`tllm plan` of a student says which commands to start on which machine: they are started, and the student learns."""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path

import pytest

from tests.support.cluster.commands import running, tllm
from tests.support.training.post_training.distilled_task import write_models
from tllm.cli.main import main

CLUSTER = """
[link]
latency = "0.2 ms"
bandwidth = "1 Gbit/s"

[[node]]
name = "localhost"
memory = "4 GB"
memory_bandwidth = "4 GB/s"
flops = { float32 = "10 Gflop/s" }

[[node]]
name = "127.0.0.1"
memory = "4 GB"
memory_bandwidth = "40 GB/s"
flops = { float32 = "100 Gflop/s" }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_models(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    lines = [
        f'model_name_or_path = "{tmp_path}/student"\ntrain_files = "{tmp_path}/rows.jsonl"\n'
        f'output_dir = "{tmp_path}/run"\ntask = "distill"\nmax_steps = 2\nseq_len = 16\nglobal_batch_size = 4\n'
        f'[distill]\nteacher_model_name_or_path = "{tmp_path}/teacher"\nteacher_secret = "{tmp_path}/teacher.key"\n'
        "top_k = 6\n"
    ]
    (tmp_path / "job.toml").write_text("".join(lines))
    return tmp_path / "job.toml"


def planned(job: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, list[dict[str, object]]]:
    assert main(["plan", str(job), "--cluster", str(job.parent / "cluster.toml"), "--json", *more]) == 0
    found: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return found


def test_the_commands_that_a_plan_shows_train_the_student(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = planned(job, capsys, "--set", "distill.teacher_nodes=127.0.0.1")
    assert [one["teachers"] for one in found["choices"]] == [["127.0.0.1"]]
    (there, teach), (here, train) = found["commands"]
    assert (there, here) == ("127.0.0.1", "localhost")
    words = [shlex.split(str(command).replace("7070", str(port)))[1:] for command in (teach, train)]
    with running(*words[0], "--threads", "1") as teacher:
        teacher.until(r"teaches at \S+:\d+")
        done = tllm(*words[1], "--threads", "1")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "done after 2 steps" in done.stdout
    job_of_run = next((job.parent / "run").glob("*.toml")).read_text()
    assert f'teachers = ["127.0.0.1:{port}"]' in job_of_run


def test_all_choices_are_compared_in_words(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = planned(job, capsys)["choices"]
    assert {tuple(one["teachers"]) for one in every} == {(), ("127.0.0.1",)}  # type: ignore[arg-type]
    seconds = [float(str(one["seconds"])) for one in every]
    assert seconds == sorted(seconds)
    cluster = str(job.parent / "cluster.toml")
    assert main(["plan", str(job), "--cluster", cluster, "--set", "distill.teacher_nodes=127.0.0.1"]) == 0
    out = capsys.readouterr().out
    assert "to start the first:" in out and "teacher.key is written on 127.0.0.1" in out
    for named, why in (("pi", "names 'pi', and the cluster has localhost, 127.0.0.1"), ("localhost", "has the data")):
        assert main(["plan", str(job), "--cluster", cluster, "--set", f"distill.teacher_nodes={named}"]) == 2
        assert why in capsys.readouterr().err
