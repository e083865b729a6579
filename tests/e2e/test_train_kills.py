"""A run that is killed at moments drawn at random, and goes on under plans drawn at random, is the undisturbed one.

`make soak` kills fifty times; TLLM_SEED repeats one of its runs.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster.commands import Running, running, tllm
from tests.support.cluster.processes import wait_until_gone, workers_of
from tests.support.training.runs import final, train
from tests.support.training.runs import records as told
from tests.support.training.small_job import write_job
from tests.support.training.training_step import furthest
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.job.job_file import read_job
from tllm.training.job.run_folder import STARTS
from tllm.training.report.metrics import FILE, read_records
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.training.trainer import RankTrainer

EXACT = (
    "pp=1",
    "dp=2",
    "dp=4",
    "dp=2,zero=1",
    "dp=4,zero=2",
    "dp=2,zero=3",
    "pp=2",
    "pp=4,schedule=gpipe",
    "pp=2,schedule=zero_bubble,depth=2",
    "pp=2,chunks=2",
    "dp=2,pp=2,zero=2,recompute=layer",
    "dp=2,pp=2,zero=3",
    "dp=2,zero=1,offload=disk",
)
"""Plans that change no bit with `deterministic = true`."""

OTHERS = (
    "dp=3:1",
    "dp=3,zero=2",
    "tp=2",
    "tp=3,shares=1:2:1",
    "tp=2,sequence=true",
    "cp=2",
    "dp=2,cp=2",
    "pp=2,tp=1+2",
    "dp=2,tp=2,zero=1",
)
MOMENTS = ("starting", "training", "saving")
LOST, KILLED = 4, -signal.SIGKILL
"""How the command may end: with the name of the node that it lost, or as the one that was killed."""


class Folder:
    """What a run's folder tells from outside."""

    def __init__(self, run: Path) -> None:
        self.run = run

    @property
    def starts(self) -> int:
        file = self.run / STARTS
        return len(file.read_bytes().splitlines()) if file.exists() else 0

    @property
    def step(self) -> int:
        file = self.run / FILE
        return max((record.step for record in read_records(file)), default=0) if file.exists() else 0

    @property
    def is_saving(self) -> bool:
        return any(self.run.glob("step-*.tmp"))


def wait(command: Running, dice: random.Random, folder: Folder, starts: int, most: int) -> str:
    """Until a moment drawn at random, `most` steps later at the latest, or the end of the command; which it was."""
    first = folder.step

    def until_it(happens: Callable[[], bool]) -> bool:
        while command.process.poll() is None:
            if happens() or folder.step >= first + most:
                return True
            time.sleep(0.002)
        return False

    moment = dice.choice(MOMENTS)
    if moment == "starting":
        until = time.monotonic() + dice.uniform(0, 4)
        until_it(lambda: time.monotonic() >= until)
    elif until_it(lambda: folder.starts > starts):
        wanted = folder.step + dice.randint(1, most)
        until_it((lambda: folder.is_saving) if moment == "saving" else (lambda: folder.step >= wanted))
        time.sleep(dice.uniform(0, 0.02))
    return moment


def killed(words: list[str], dice: random.Random, folder: Folder, most: int) -> bool:
    """Start the run and kill one of its processes within `most` steps; False if it ended before."""
    starts = folder.starts
    with running(*words) as command:
        moment = wait(command, dice, folder, starts, most)
        here = [command.process.pid, *workers_of(command.process.pid)]
        victim = dice.choice(here)
        if command.process.poll() is not None:
            code, said = command.wait()
            assert code == 0, said
            return False
        os.kill(victim, signal.SIGKILL)
        code, said = command.wait()
        print(f"{words[-1]}: killed {here.index(victim)} of {len(here)} while {moment}, at step {folder.step}: {code}")
        assert code in (LOST, KILLED), said
        assert "Traceback" not in said
        assert wait_until_gone(here[1:]) == []
    return True


@pytest.mark.soak  # `test_training_restart` kills a command, `test_faults` a node, `test_resume` takes plans
@pytest.mark.timeout(300)
@pytest.mark.parametrize("exact", [False, True], ids=["any plan", "deterministic"])
def test_three_kills(exact: bool, tmp_path: Path) -> None:
    play(tmp_path, exact, kills=2 if exact else 1, steps=60, seed=5)


@pytest.mark.soak
@pytest.mark.timeout(7200)  # beside much other work a step of four ranks takes ten seconds
@pytest.mark.parametrize("exact", [False, True], ids=["any plan", "deterministic"])
def test_fifty_kills(exact: bool, tmp_path: Path) -> None:
    play(tmp_path, exact, kills=25, steps=150, seed=int(os.environ.get("TLLM_SEED") or secrets.randbelow(2**32)))


def test_no_save_is_ahead_of_the_metrics(tmp_path: Path) -> None:
    """The command may be killed while its workers go on, so they do not leave the lines to it."""
    job = read_job(write_job(tmp_path, max_steps=6, save_steps=2)).job
    ahead: list[tuple[int, int]] = []

    def watch(trainer: RankTrainer) -> None:
        save = trainer._state._saves.save

        def watched(step: int, blocks: Sequence[TensorBlock], facts: Mapping[str, Any]) -> None:
            ahead.append((step, Folder(Path(job.output_dir)).step))
            save(step, blocks, facts)

        trainer._state._saves.save = watched  # type: ignore[method-assign]

    train(job, "pp=1", damage=watch)
    assert ahead == [(2, 2), (4, 4), (6, 6)]


def play(root: Path, exact: bool, kills: int, steps: int, seed: int) -> None:
    """Kill a run so often, let it end, and compare all that it leaves with a run on one rank that nobody disturbed."""
    print(f"TLLM_SEED={seed}")
    dice = random.Random(seed)
    file = write_job(
        root,
        dict(num_hidden_layers=4, tie_word_embeddings=False, initializer_range=0.02),  # as `train` begins a model
        max_steps=steps,
        save_steps=4,
        microbatch_size=1,
        dtype="float32" if exact else "float64",
        deterministic=exact,
    )
    job = read_job(file).job
    folder, plans = Folder(Path(job.output_dir)), EXACT if exact else EXACT + OTHERS
    words = ["train", str(file), "--threads", "1", "--quiet", "--on-loss", "end", "--plan"]
    for left in range(kills, 0, -1):  # each has an even part of the steps that are left, whatever runs beside
        most = max(1, (steps - folder.step) // (left + 1))
        plan = dice.choice(plans)
        assert killed([*words, plan], dice, folder, most), f"it ended with {left} of {kills} kills to come"
    done = tllm(*words, dice.choice(plans))
    assert done.returncode == 0, done.stderr
    alone = root / "alone"
    want = told(train(replace(job, output_dir=str(alone)), "pp=1"))
    compare(folder.run, alone, [record.loss for record in want], exact)


def compare(run: Path, alone: Path, losses: list[float], exact: bool) -> None:
    steps = read_records(run / FILE)
    assert [record.step for record in steps] == list(range(1, len(losses) + 1))
    position, wanted = (open_folder(folder / f"step-{len(losses)}").facts["data"] for folder in (run, alone))
    for facts in (position, wanted):
        assert facts.pop("files")
    assert position == wanted, "other rows were read, or one of them twice"
    if exact:
        assert [record.loss for record in steps] == losses
        assert all(torch.equal(x, final(alone)[name]) for name, x in final(run).items())
    else:
        assert [record.loss for record in steps] == pytest.approx(losses, rel=1e-9)
        off, name = furthest(final(run), final(alone))
        assert off < 1e-9, name
