"""How far a training run has come, as the replicas of its coordinator's state record it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.consensus.replicated_state import StepsTrained, TrainedSteps
from tllm.node.train.elastic_run import ElasticRun
from tllm.training.job.initial_model import FOLDER, digest_of
from tllm.training.job.job import Job

LOOK_SECONDS = 0.1
"""Steps that were told within so long are agreed on together: whoever takes over may know of a few less."""


@contextlib.asynccontextmanager
async def keeping_steps(run: ElasticRun, job: Job) -> AsyncIterator[None]:
    """While the block runs, let every replica know which step was told last and which is saved. `job` is the run's."""
    task = asyncio.create_task(_keep(run, Path(job.output_dir).resolve()), name="replicated steps")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Deposed):  # of which the coordinator itself is told too
            await task


async def _keep(run: ElasticRun, folder: Path) -> None:
    replication = run.coordinator.replication
    if replication is None:
        return
    await run.recovery.until(lambda: run.progress.has_begun)
    beginning = await asyncio.to_thread(digest_of, folder / FOLDER)
    agreed: TrainedSteps | None = None
    while True:
        progress = run.progress
        now = TrainedSteps(
            step=progress.furthest,
            saved=progress.saved,
            written=f"{socket.gethostname()}:{folder}",
            beginning=beginning,
        )
        if now != agreed:
            await replication.propose(StepsTrained(now))
            agreed = now
        await asyncio.sleep(LOOK_SECONDS)
