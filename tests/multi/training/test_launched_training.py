"""Ranks that a launcher starts find each other, and end together when one of them is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.families import save_model
from tests.support.training.runs import rows_file
from tllm.cluster.join_token import JoinToken
from tllm.core.errors import AuthError, ClusterError, ConfigError
from tllm.node.machine.launcher_env import Launched
from tllm.node.sources.launched_tasks import JOIN_VARIABLE, LaunchedTasks, addresses_of, meeting_file, work_launched
from tllm.recipes.bench.processes import free_row

ROOT = Path(__file__).resolve().parents[3]
RANK_1 = Launched(1, 2, 1, 2, "localhost", "this-run")


def stale() -> str:
    """What a run that was killed left: an address where nobody listens, a token of nobody's."""
    return f"127.0.0.1:{free_row(1)} {JoinToken(bytes(32), bytes(32))}\n"


def write_stale(file: Path) -> None:
    file.touch(0o600)
    file.write_text(stale())


@pytest.mark.slow
@pytest.mark.timeout(300)  # it starts four processes, in part one after the other
def test_torchrun_starts_a_run_and_any_rank_can_end_it(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model")
    rows, run, port = rows_file(tmp_path / "rows.jsonl"), tmp_path / "run", free_row(1)
    run.mkdir()
    left = run / f".join-127.0.0.1-{port}-none"
    write_stale(left)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command += ["-m", "tests.support.training.launched_run", str(tmp_path / "model"), str(rows), str(run)]
    steps: list[int] = []
    ended = other = 0
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            match line.split():
                case ["pid", pid]:
                    other = int(pid)
                case ["step", step, _]:
                    steps.append(int(step))
                    if len(steps) == 3:
                        assert not left.exists(), "the secret is needed no more"
                        os.kill(other, signal.SIGTERM)
                case ["ended", step]:
                    ended = int(step)
        errors = process.stderr.read()
        assert process.wait(60) == 0, errors
    assert steps == list(range(1, ended + 1)), errors
    assert 3 <= ended < 100_000
    assert (run / f"step-{ended}").is_dir()


def test_only_we_can_read_where_the_coordinator_is_and_only_while_it_forms(tmp_path: Path) -> None:
    file = meeting_file(RANK_1, tmp_path / "run")
    tasks = LaunchedTasks(RANK_1, tmp_path / "run")
    tasks.start(1, "127.0.0.1:5", "secret")
    assert file.read_text() == "127.0.0.1:5 secret\n"
    assert file.stat().st_mode & 0o777 == 0o600
    tasks.stop()
    assert list(file.parent.iterdir()) == []


def test_a_rank_that_finds_nobody_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"rank 1 found no coordinator within 0\.3 s: .*join-this-run is not there"):
        work_launched(RANK_1, tmp_path, {}, seconds=0.3)
    write_stale(meeting_file(RANK_1, tmp_path))
    with pytest.raises(ClusterError, match=r"rank 1 found no coordinator .* cannot reach coordinator"):
        work_launched(RANK_1, tmp_path, {}, seconds=0.3)


def test_what_the_operator_says_goes_before_the_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot reach coordinator"):
        work_launched(RANK_1, tmp_path, {JOIN_VARIABLE: stale()}, seconds=0.3)
    with pytest.raises(ConfigError, match="is not an address"):
        work_launched(RANK_1, tmp_path, {JOIN_VARIABLE: "here"}, seconds=0.3)


def test_an_address_is_enough_where_a_secret_is_shared_and_is_tried_until_the_first_is_there(tmp_path: Path) -> None:
    told = {JOIN_VARIABLE: f"127.0.0.1:{free_row(1)}", "TLLM_SECRET": "s" * 32}
    with pytest.raises(ClusterError, match=r"rank 1 found no coordinator within 0\.3 s: cannot reach coordinator"):
        work_launched(RANK_1, tmp_path, told, seconds=0.3)
    with pytest.raises(AuthError, match="TLLM_SECRET has 1 characters"):
        work_launched(RANK_1, tmp_path, {**told, "TLLM_SECRET": "s"}, seconds=0.3)


def test_rank_0_listens_no_farther_than_the_others_are() -> None:
    assert addresses_of(RANK_1) == ("127.0.0.1", "127.0.0.1")
    far = Launched(0, 2, 0, 1, "192.0.2.7", "this-run")
    assert addresses_of(far) == ("192.0.2.7", "192.0.2.7")
