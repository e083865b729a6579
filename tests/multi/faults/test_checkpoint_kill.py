"""A process that saves without end and is killed at moments of its own: what is left is whole, and it goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.checkpoint.checkpoint import open_folder
from tllm.training.report.metrics import FILE, read_records

PROGRAM = """
import os, sys, torch, traceback
from pathlib import Path
from tllm.training.state.tensor_blocks import TensorBlock
from tllm.training.checkpoint.async_saves import AsyncSaves
from tllm.training.report.metrics import MetricsFile, StepRecord

def run():
    root = Path(sys.argv[1])
    weight = torch.zeros(200_000)
    blocks = [TensorBlock("w", ((0, 200_000),), weight)]
    checkpoints = AsyncSaves(root)
    done = 0
    if checkpoints.latest is not None:
        opened = checkpoints.restore(blocks)
        done = opened.facts["step"]
        assert bool((weight == done).all())
    metrics = MetricsFile(root, done)
    begun = done
    while True:
        done += 1
        weight.fill_(float(done))
        metrics.write(StepRecord(step=done, loss=0.0, grad_norm=0.0, learning_rate=0.0, tokens=1, seconds=1.0,
                                 tokens_per_second=1.0))
        checkpoints.save(done, blocks, {"step": done})
        assert all(result.error == "" for result in checkpoints.finished())
        if done == begun + 2:  # the save before this one is whole, for a save waits for the last
            print(os.getpid(), flush=True)

# Each line is a start: a process that has loaded torch, and knows nothing of those before it.
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            run()
        except Exception:
            traceback.print_exc()
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
KILLS = 5


def test_killed_again_and_again(tmp_path: Path) -> None:
    draw = random.Random(3)
    before = 0
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    starter = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    for _ in range(KILLS):
        assert starter.stdin is not None and starter.stdout is not None
        starter.stdin.write(b"\n")
        starter.stdin.flush()
        process = int(starter.stdout.readline())
        time.sleep(draw.uniform(0.05, 0.4))
        os.kill(process, signal.SIGKILL)
        assert int(starter.stdout.readline()) == -signal.SIGKILL
        checkpoints = AsyncSaves(tmp_path)
        assert checkpoints.latest is not None and checkpoints.latest >= before
        for step in checkpoints.complete:
            weight = open_folder(tmp_path / f"step-{step}").whole("w")
            assert bool((weight == step).all()) and weight.dtype == torch.float32
        before = checkpoints.latest
        records = [record.step for record in read_records(tmp_path / FILE)]
        assert records == list(range(1, len(records) + 1)), "no step twice, none left out"
        assert len(records) >= before
    assert before >= KILLS, "it went on from what was left"
    starter.communicate()
    assert starter.returncode == 0
