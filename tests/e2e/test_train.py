"""`tllm train` as a user runs it: to its end, stopped and gone on with, with workers killed under it, and wrongly."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.cluster.commands import Running, running, tllm
from tests.support.cluster.processes import wait_until_gone, workers_of
from tests.support.commands.forked_command import ForkedCommand
from tests.support.training.runs import records as told
from tests.support.training.runs import train
from tests.support.training.small_job import write_job
from tllm.cli.main import main
from tllm.recipes.bench.processes import free_row
from tllm.training.job.job_file import read_job
from tllm.training.job.run_folder import commit_here
from tllm.training.report.metrics import StepRecord, read_records

pytestmark = [
    pytest.mark.timeout(300),  # each starts several processes that load torch, some one after the other
    pytest.mark.usefixtures("own_process"),
]

SAVED = 130
"""The exit code of a run that was told to save and leave."""


def records(run: Path) -> list[StepRecord]:
    return read_records(run / "metrics.jsonl")


def starts(run: Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    return [(line["step"], line["plan"]) for line in lines]


def workers(command: Running) -> list[int]:
    """The processes of local-0, local-1 and so on, in the order in which they were started."""
    return workers_of(command.process.pid)


def step_line(step: int) -> str:
    return rf"^step +{step}/"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that ran to its end without being disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    done = tllm("train", str(write_job(folder)), "--plan", "dp=2", "--set", "seed=7")
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    assert "done after 60 steps; the model is in" in done.stdout
    return folder


def test_a_model_from_nothing(whole: Path) -> None:
    run = whole / "run"
    steps = records(run)
    assert [record.step for record in steps] == list(range(1, 61))
    assert steps[0].loss > 5.5 and sum(record.loss for record in steps[-5:]) / 5 < 4.4
    assert all(record.tokens == 512 and record.bytes_sent > 0 for record in steps)
    resolved = (run / "job.toml").read_text()
    for line in ("seed = 7  # --set", 'plan = "dp=2"  # --plan', "max_steps = 60  # job.toml", "dtype = .*  # default"):
        assert any(re.fullmatch(line, one) for one in resolved.splitlines()), resolved
    (start,) = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert start["step"] == 0 and start["world_size"] == 2
    assert (start["commit"] is None) == (commit_here() is None)  # it may have moved on meanwhile
    assert sorted(path.name for path in run.iterdir()) == [
        "final",
        "job.toml",
        "metrics.jsonl",
        "start",
        "starts.jsonl",
        "step-40",
        "step-60",
    ]


def test_both_serving_and_transformers_open_what_was_trained(whole: Path) -> None:
    final = whole / "run" / "final"
    model = transformers.AutoModelForCausalLM.from_pretrained(final)
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    prompt = tokenizer("The following", return_tensors="pt").input_ids
    theirs = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    words = ["--prompt", "The following", "--max-tokens", "12", "--temperature", "0", "--plan", "pp=2", "--json"]
    done = tllm("generate", str(final), *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == theirs.tolist()


@pytest.fixture
def heard_hangup() -> Iterator[None]:
    """A command hears of a closed terminal, also where the tests themselves are run by `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heard_hangup")
def test_told_to_stop_it_saves_and_the_same_command_goes_on_under_any_plan(tmp_path: Path) -> None:
    """Ctrl-C, then another plan and a closed terminal, which counts as a SIGTERM, then a third plan to the end: as if
    nothing had happened. Until then the run is to be so long that it is not over before it is told; no step depends on
    how long that is."""
    job = write_job(tmp_path, max_steps=100_000, lr_scheduler_type="constant_with_warmup", warmup_steps=12)
    words = ["train", str(job), "--set", "seed=7"]
    run, left = tmp_path / "run", 0
    for plan, number in (("dp=2", signal.SIGINT), ("pp=2", signal.SIGHUP)):
        with running(*words, "--plan", plan) as command:
            first = command.until(r"^step +(\d+)/")
            command.process.send_signal(number)
            said = command.until(r"left after step (\d+) of 100000; the same command goes on")
            code, errors = command.wait()
            assert code == SAVED and "error" not in errors
        assert left < int(first[1]) <= int(said[1]) and (run / f"step-{said[1]}").is_dir()
        assert not (run / "final").exists()
        left = int(said[1])
    steps = left + 8
    done = tllm(*words, "--plan", "tp=2", "--quiet", "--set", f"max_steps={steps}")
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in starts(run)] == sorted({step for step, _ in starts(run)}) and len(starts(run)) == 3
    assert [record.step for record in records(run)] == list(range(1, steps + 1))
    alone = replace(read_job(job).job, seed=7, output_dir=str(tmp_path / "alone"), max_steps=steps)
    for here, there in zip(records(run), told(train(alone, "pp=1")), strict=True):
        assert here.loss == pytest.approx(there.loss, rel=1e-4) and here.learning_rate == there.learning_rate


def test_told_while_it_starts_it_ends(tmp_path: Path) -> None:
    with running("train", str(write_job(tmp_path)), "--plan", "dp=2") as command:
        while len(here := workers(command)) < 2:
            time.sleep(0.01)
        code, said = command.interrupt()
    assert code == SAVED and "Traceback" not in said
    assert wait_until_gone(here) == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["start"]


def test_told_twice_it_ends_at_once(tmp_path: Path) -> None:
    """Its first step takes longer than this test may."""
    job = write_job(tmp_path, global_batch_size=100_000, seq_len=128)
    with running("train", str(job), "--plan", "dp=2") as command:
        command.until("matrix peak")
        here = workers(command)
        assert len(here) >= 2, "and one more may be kept ready"
        command.process.send_signal(signal.SIGINT)
        command.until("once more ends at once")
        code, said = command.interrupt()
    assert code == SAVED and "Traceback" not in said
    assert wait_until_gone(here) == []
    assert records(tmp_path / "run") == [] and not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        pytest.param("SIGKILL", "went away", marks=pytest.mark.soak),  # as in `test_train_hosts`
        ("SIGSTOP", r"has been silent for \d\.\d s: its machine answers and its process does not: it is stopped, .*"),
    ],
)
def test_a_worker_that_is_lost_ends_the_run_with_its_name(number: str, words: str, tmp_path: Path) -> None:
    job = write_job(tmp_path, max_steps=100_000)
    with running("train", str(job), "--plan", "pp=2", "--on-loss", "end") as command:
        command.until(step_line(3))
        here = workers(command)
        os.kill(here[1], signal.Signals[number])
        code, said = command.wait()
    assert code == 4
    *_, last = said.splitlines()
    assert re.fullmatch(rf"error: node local-1 \(rank 1, layers \[1, 2\)\) {words}", last), said
    assert "Traceback" not in said
    assert wait_until_gone(here) == []


def test_a_worker_that_is_lost_is_started_again(tmp_path: Path) -> None:
    job = write_job(tmp_path, max_steps=100_000)
    with running("train", str(job), "--plan", "pp=2") as command:
        command.until(step_line(5))
        here = workers(command)
        os.kill(here[1], signal.SIGKILL)
        command.until(r"^after step \d+: node local-1 \(rank 1, layers \[1, 2\)\)")
        again = command.until(r"^goes on after [\d.]+ s after step (\d+).*, from what the others have in memory; ")
        command.until(step_line(int(again[1]) + 3))
        code, said = command.interrupt()
    assert code == SAVED and "Traceback" not in said
    steps = [record.step for record in records(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= int(again[1]) + 3
    assert starts(tmp_path / "run") == [(0, PP2), (int(again[1]), PP2)]
    assert wait_until_gone(here) == []


PP2 = "pp=2,tp=1+1,layers=1+1"


def test_a_command_that_is_killed_leaves_no_worker(tmp_path: Path) -> None:
    with running("train", str(write_job(tmp_path, max_steps=100_000)), "--plan", "dp=2") as command:
        command.until(step_line(3))
        here = workers(command)
        command.process.kill()
        assert wait_until_gone(here) == []


def test_weights_that_explode_end_the_run(tmp_path: Path) -> None:
    job = write_job(tmp_path, learning_rate=1e9, save_steps=1)
    done = tllm("train", str(job), "--plan", "dp=2")
    assert done.returncode == 7
    *_, error, hint = done.stderr.splitlines()
    found = re.search(r"step (\d+) went bad: .* on rank [01].* model\.\S+ on rank [01]", error)
    assert error.startswith("error: ") and found, error
    assert hint.startswith("hint: nothing was updated in this step")
    assert [record.step for record in records(tmp_path / "run")] == list(range(1, int(found[1])))


def test_a_weight_that_is_no_number_is_named(whole: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(whole / "run" / "final", model)
    (model / "tllm.manifest.json").unlink()
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    job = write_job(tmp_path, max_steps=2)
    job.write_text(job.read_text().replace("config_name", "#"))
    done = tllm("train", str(job), "--set", f"model_name_or_path={model}", "--plan", "pp=2")
    assert done.returncode == 7
    assert "step 1 went bad" in done.stderr and "rank" in done.stderr
    assert "Traceback" not in done.stderr
    assert records(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--set", "learning_rte=1"], 2, "'learning_rte' is no key of a job"),
        (["--set", "lr=1"], 2, "give learning_rate"),
        (["--set", "max_steps=many"], 2, "--set: max_steps = 'many'"),
        (["--set", "train_files=/nowhere.jsonl"], 2, "/nowhere.jsonl is not there"),
        (["--set", "config_name=/nowhere"], 2, "/nowhere is neither a model's folder nor a config.json"),
        (["--set", "report_to=wandb"], 2, "report_to names 'wandb'"),
        (["--plan", "pp=3"], 3, "a model of 2 layers makes at most 2 stages"),
        (["--plan", "dp=2,pq=2"], 3, "pq"),
        (["--plan", "dp=2", "--local", "3"], 3, "has 2 ranks for 3 machines or processes"),
        (["--set", "local_steps=4", "--plan", "dp=2,zero=3"], 3, "local_steps"),
        (["--nodes", "2", "--cluster-folder", "/nowhere"], 2, "give --nodes and --cluster-port with it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_said_in_a_line_and_leaves_nothing(
    words: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path)
    assert main(["train", str(job), *words]) == code
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") <= 2
    assert said in shown.err
    assert list(tmp_path.glob("run/*")) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": 5}', "bad.jsonl, line 2: a row with the keys ['text'] holds no text"),
        ('{"txt": "a"}', "bad.jsonl, line 2: a row with the keys ['txt'] holds no text"),
        ("{", "bad.jsonl, line 2"),
    ],
)
def test_a_bad_row_is_named_and_may_be_mended(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a tokenizer is trained without it."""
    bad, job = tmp_path / "bad.jsonl", write_job(tmp_path)
    bad.write_text(f'{{"text": "one"}}\n{line}\n')
    assert main(["train", str(job), "--set", f"train_files={bad}"]) == 2
    assert said in capsys.readouterr().err
    assert list((tmp_path / "run").iterdir()) == []


def test_a_dry_run_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["train", str(job), "--plan", "dp=2,zero=1", "--dry-run"]) == 0
    assert "dp=2" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before


def test_another_model_than_the_run_began_with(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    config = json.loads((whole / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    words = ["--set", f"config_name={tmp_path / 'config.json'}", "--set", f"output_dir={tmp_path / 'copy' / 'run'}"]
    assert main(["train", str(whole / "job.toml"), *words]) == 2
    assert "began with another config.json" in (said := capsys.readouterr().err) and "hidden_size" in said


def launched(*command: str, **environment: str) -> subprocess.Popen[str]:
    return ForkedCommand(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.soak  # `test_launched_training` starts a run by torchrun and ends it
def test_torchrun_starts_each_rank(tmp_path: Path) -> None:
    job = write_job(tmp_path, max_steps=5)
    words = ("--nproc-per-node", "2", "--master-port", str(free_row(1)), "-m", "tllm.cli", "train", str(job))
    with launched("-m", "torch.distributed.run", *words) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert said.count("done after 5 steps") == 1
    assert [record.step for record in records(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert starts(tmp_path / "run") == [(0, "pp=1,tp=1,layers=2,dp=2")]
    assert (tmp_path / "run" / "final").is_dir() and not list((tmp_path / "run").glob(".join*"))


def test_slurm_starts_each_rank_and_stops_them_by_its_signal(tmp_path: Path) -> None:
    """`scancel` and a time limit send SIGTERM to every rank."""
    command = ("-m", "tllm.cli", "train", str(write_job(tmp_path, max_steps=100_000)), "--plan", "pp=2")
    facts = dict(SLURM_NTASKS="2", SLURM_JOB_ID="11", SLURM_STEP_ID="0", SLURMD_NODENAME="localhost")
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(launched(*command, **facts, SLURM_PROCID=str(i), SLURM_LOCALID=str(i))) for i in (1, 0)
        ]
        other, first = ranks
        assert first.stdout is not None
        assert any(re.search(step_line(3), line) for line in first.stdout)
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        said, errors = first.communicate()
        assert first.returncode == SAVED and "error" not in errors
        assert other.wait() == 0
    left = re.search(r"left after step (\d+) of", said)
    assert left and (tmp_path / "run" / f"step-{left[1]}").is_dir()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for four saves of the job."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"this machine mounts no small file system: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_saves_and_not_the_run(small_disk: Path, tmp_path: Path) -> None:
    """What fills it is taken away after some failed saves; those that follow are whole again."""
    job = write_job(tmp_path, output_dir=str(small_disk), save_steps=5, max_steps=100_000)
    ballast = small_disk / "ballast"
    with running("train", str(job), "--plan", "dp=2") as command:
        command.until("saved step 5:")
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free))
        command.until(r"the save of step \d+ failed, the run goes on: .*No space left on device")
        command.until(r"the save of step \d+ failed, the run goes on: .*No space left on device")
        ballast.unlink()  # a busy machine may have failed at another save before this
        first = command.until(r"saved step (\d+):")
        command.until(rf"saved step {int(first[1]) + 5}:")
        code, said = command.interrupt()
    assert code == SAVED and "error" not in said
    steps = [record.step for record in records(small_disk)]
    assert all(a < b for a, b in itertools.pairwise(steps))
