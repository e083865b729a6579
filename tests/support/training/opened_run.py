"""Training runs that a test opens within its own process, and leaves within its time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.train.open_training import OnLoss, TrainingWork, open_training
from tllm.node.train.training_run import TrainingRun
from tllm.spec.families import spec_from_config
from tllm.spec.hf_config import read_config
from tllm.spec.plan import Plan
from tllm.training.job.job import Job
from tllm.training.job.job_file import ResolvedJob


def play(scene: Coroutine[Any, Any, None], seconds: float) -> None:
    """Run a scene to its end. TimeoutError when it takes longer."""

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await scene

    asyncio.run(limited())


@contextlib.asynccontextmanager
async def training(job: Job, plan: str, on_loss: OnLoss = "end", **options: Any) -> AsyncIterator[TrainingRun]:
    """The run of a job under a plan, for the length of a block; `options` are those of `ClusterOptions`."""
    config = read_config(Path(job.model_name_or_path or ""))
    parsed = Plan.parse(plan, spec_from_config(config).num_layers)
    work = TrainingWork(ResolvedJob(job, {}), parsed, json.dumps(config))
    async with open_training(work, ClusterOptions(**options), on_loss=on_loss) as run:
        yield run
