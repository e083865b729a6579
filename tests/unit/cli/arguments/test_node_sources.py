"""What started a command decides where its nodes come from, and what cannot go together is said in one line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tllm.cli.arguments.node_sources import be_first, joining, launched_here
from tllm.cli.main import main
from tllm.cli.planning.live_survey import measured
from tllm.core.errors import AuthError, ConfigError
from tllm.node.coordinator import survey_cluster
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.machine.launcher_env import Launched
from tllm.node.sources.launched_tasks import MEET_SECONDS, LaunchedTasks, meeting_file, work_launched
from tllm.node.sources.node_source import JoinLine

STEP = dict(SLURM_PROCID="0", SLURM_STEP_ID="0", SLURM_JOB_ID="7", SLURM_NTASKS="3", SLURMD_NODENAME="localhost")
TASKS = Launched(1, 3, 0, 3, "localhost", "7-0", "slurm", 2, {"engine": "slurm", "job": "7"})


def asked(**more: object) -> argparse.Namespace:
    given = dict(on=None, nodes=None, local=None, threads=None, cluster_host="0.0.0.0", numa_binding="auto")
    return argparse.Namespace(**{**given, **more})


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM") or name in ("RANK", "TLLM_SECRET")]:
        monkeypatch.delenv(name)


def test_tasks_of_srun_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_here(asked()) is None
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    found = launched_here(asked(on="slurm"))
    assert found is not None and (found.world_size, found.run) == (3, "7-0")
    with pytest.raises(ConfigError, match="has started 3 processes, and --nodes or --local would start others"):
        launched_here(asked(nodes=3))
    with pytest.raises(ConfigError, match="--numa-binding node is for workers that this command starts"):
        launched_here(asked(numa_binding="node"))


def test_the_first_task_is_told_what_an_operator_would_say() -> None:
    args = asked()
    be_first(args, TASKS, spare=1)
    assert (args.nodes, args.cluster_host) == (2, "127.0.0.1")
    assert 1 <= args.threads <= 2
    given = asked(cluster_host="10.0.0.1", threads=7)
    be_first(given, TASKS)
    assert (given.nodes, given.cluster_host, given.threads) == (3, "10.0.0.1", 7)
    with pytest.raises(ConfigError, match="3 spare nodes of 3 tasks leave none"):
        be_first(asked(), TASKS, spare=3)


def test_tasks_are_told_by_a_file_and_others_by_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = joining(TASKS, tmp_path)
    source = found["source"]
    assert isinstance(source, LaunchedTasks) and found["join_seconds"] == MEET_SECONDS
    source.start(2, "10.0.0.1:7", "tllm1-x")
    assert meeting_file(TASKS, tmp_path).read_text() == "10.0.0.1:7 tllm1-x\n"
    labels = {"engine": "slurm", "job": "7"}
    assert source.nodes() == {"task-1": {**labels, "task": "1"}, "task-2": {**labels, "task": "2"}}
    source.stop()
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out
    lines = {
        "": "run this on each of 2 other machines (the token is good for an hour):\n\n"
        "  tllm join 10.0.0.1:7 --token tllm1-x\n\n",
        "s" * 32: "waits for 2 other machines that know TLLM_SECRET. Run there:\n\n  tllm join 10.0.0.1:7\n\n",
    }
    for secret, line in lines.items():
        monkeypatch.setenv("TLLM_SECRET", secret)
        found = joining(None, tmp_path)
        assert isinstance(found["source"], JoinLine) and found["secret"] == (secret.encode() or None)
        found["source"].start(2, "10.0.0.1:7", "tllm1-x")
        assert found["source"].nodes() == {}
        assert capsys.readouterr().out == line, "no token where there is a secret"


def test_a_file_that_others_could_have_written_leads_nobody_anywhere(tmp_path: Path) -> None:
    file = meeting_file(TASKS, tmp_path)
    file.write_text("10.0.0.1:7 tllm1-x\n")
    file.chmod(0o622)
    with pytest.raises(AuthError, match="not this user's alone"):
        work_launched(TASKS, tmp_path, {}, seconds=0.3)
    file.chmod(0o600)
    os.chown(file, 12345, -1) if os.geteuid() == 0 else file.chmod(0o622)
    with pytest.raises(AuthError, match="not this user's alone"):
        work_launched(TASKS, tmp_path, {}, seconds=0.3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "3"], "a launcher has started 3 processes"),
        (["--plan", "pp=2"], "has 2 ranks"),
        (["--spare-nodes", "3"], "3 spare nodes of 3 tasks"),
    ],
)
def test_bad_input_of_a_server_under_srun(
    words: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", str(folder), "--port", "0", *words]) in (2, 3)
    assert said in capsys.readouterr().err


def test_slurm_that_is_asked_for_must_be_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--on", "slurm"]) == ConfigError.exit_code
    assert "this is no job of Slurm" in capsys.readouterr().err


def test_a_line_that_is_said_again_is_for_as_many_as_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a survey and of `tllm doctor`, as of commands that run a model."""

    async def survey_nodes(request: object, config: str, nodes: int, options: ClusterOptions) -> NoReturn:
        assert options.source is not None
        for count in (2, 1):
            options.source.start(count, "box:7000", "tllm1-abc")
        raise ConfigError("far enough")

    monkeypatch.setattr(survey_cluster, "survey_nodes", survey_nodes)
    where: Any = dict(cluster_host="127.0.0.1", cluster_port=0, device="cpu", threads=None, keep=None)
    with pytest.raises(ConfigError, match="far enough"):
        measured(argparse.Namespace(nodes=3, local=None, **where), None, "{}")  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert said.index("each of 2 other machines") < said.index("one other machine")
