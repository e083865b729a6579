"""What each process of a launcher runs in a test: its rank of a training run. `python -m … MODEL ROWS RUN`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tllm.node.machine.launcher_env import Launched, launched
from tllm.node.sources.launched_tasks import work_launched
from tllm.node.train.open_training import TrainingWork, open_launched
from tllm.spec.plan import Plan
from tllm.training.job.initial_model import open_initial_model
from tllm.training.job.job import Job
from tllm.training.job.job_file import ResolvedJob
from tllm.training.report.events import RunEnded, RunStepped


async def follow(found: Launched, job: Job) -> None:
    beginning = open_initial_model(job)
    plan = Plan.parse(f"dp={found.world_size}", beginning.spec.num_layers)
    work = TrainingWork(ResolvedJob(job, {}), plan, json.dumps(beginning.config))
    async with open_launched(found, work) as run:
        async for news in run.events():
            if isinstance(news, RunStepped):
                print("step", news.record.step, news.record.loss, flush=True)
            elif isinstance(news, RunEnded):
                print("ended", news.step, flush=True)


def main(model: str, rows: str, run: str) -> None:
    found = launched(os.environ)
    assert found is not None
    job = Job(output_dir=run, train_files=(rows,), max_steps=100_000, model_name_or_path=model, seq_len=24)
    if found.rank == 0:
        asyncio.run(follow(found, job))
    else:
        print("pid", os.getpid(), flush=True)
        work_launched(found, Path(job.output_dir), os.environ, seconds=120.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
