"""`tllm plan` of a student says which commands to start on which machine: they are started, and the student learns."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support.cluster.commands import running
from tests.support.training.post_training.distilled_task import write_models
from tllm.cli.main import main

pytestmark = pytest.mark.usefixtures("own_process")

CLUSTER = """
[link]
latency = "0.2 ms"
bandwidth = "1 Gbit/s"

[[node]]
name = "first"
memory = "4 GB"
memory_bandwidth = "4 GB/s"
flops = { float32 = "10 Gflop/s" }

[[node]]
name = "second"
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
        f'[distill]\nteacher_model_name_or_path = "{tmp_path}/teacher"\ntop_k = 6\n'
    ]
    (tmp_path / "job.toml").write_text("".join(lines))
    return tmp_path / "job.toml"


def planned(job: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, list[dict[str, object]]]:
    assert main(["plan", str(job), "--cluster", str(job.parent / "cluster.toml"), "--json", *more]) == 0
    found: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return found


def test_the_commands_that_a_plan_shows_train_the_student(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(job, capsys, "--set", "distill.teacher_nodes=second")
    assert [one["teachers"] for one in found["choices"]] == [["second"]]
    (here, train), (there, join) = found["commands"]
    assert (here, there) == ("first", "second")
    with running(*shlex.split(str(train))[1:], "--threads", "1", "--cluster-host", "127.0.0.1") as command:
        address, token = command.until(r"tllm join (\S+) --token (\S+)").groups()
        words = shlex.split(str(join).replace("HOST:PORT", address).replace("TOKEN", token))[1:]
        with running(*words, "--threads", "1") as teacher:
            command.until("done after 2 steps")
            assert teacher.wait()[0] == 0, "it ends with the run"
    job_of_run = next((job.parent / "run").glob("*.toml")).read_text()
    assert 'teacher_nodes = ["second"]' in job_of_run


def test_all_choices_are_compared_in_words(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = planned(job, capsys)["choices"]
    assert {tuple(one["teachers"]) for one in every} == {(), ("second",)}  # type: ignore[arg-type]
    seconds = [float(str(one["seconds"])) for one in every]
    assert seconds == sorted(seconds)
    cluster = str(job.parent / "cluster.toml")
    assert main(["plan", str(job), "--cluster", cluster, "--set", "distill.teacher_nodes=second"]) == 0
    out = capsys.readouterr().out
    assert "to start the first:" in out and "tllm join HOST:PORT --token TOKEN --name second" in out
    for named, why in (("pi", "names 'pi', and the cluster has first, second"), ("first", "has the data")):
        assert main(["plan", str(job), "--cluster", cluster, "--set", f"distill.teacher_nodes={named}"]) == 2
        assert why in capsys.readouterr().err
