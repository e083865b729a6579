"""Lets a node's process take the place of a coordinator that trains. The run goes on from what its ranks have in
memory.

Its own worker gets rank 0, which reads the rows and writes metrics and the finished model. So these stay on the machine
that coordinates, as before.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from tllm.cluster.consensus.replicated_state import TrainedSteps
from tllm.cluster.settings import TrainSettings
from tllm.core.errors import ConfigError, TllmError
from tllm.node.replication.replica_host import check_readable
from tllm.node.replication.succession import Office
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.replicated_steps import keeping_steps
from tllm.node.train.training_run import is_mirrored, job_of
from tllm.training.job.initial_model import FOLDER, digest_of, open_initial_model, run_name
from tllm.training.job.job import Job
from tllm.training.job.job_file import TYPES, ResolvedJob
from tllm.training.job.run_folder import JOB, add_start, start_now, write_start
from tllm.training.report.events import RunBegan, RunEvent
from tllm.training.report.metrics import last_step

log = logging.getLogger("tllm.node")

TAKEN_OVER = "the coordinator before"
"""Where the keys of a job come from that another machine read."""

Events = AsyncGenerator[RunEvent, None]

Show = Callable[[ElasticRun, Job, Events], Awaitable[None]]
"""show(run, job, events): follows the events of a run that was taken over to their end"""


async def show_nothing(run: ElasticRun, job: Job, events: Events) -> None:
    """Follow a run to its end."""
    async for _ in events:
        pass


class TrainingSuccessor:
    """The `Successor` of a coordinator that trains. `show` follows the run."""

    def __init__(self, show: Show = show_nothing) -> None:
        self._show = show
        self._run: ElasticRun | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, office: Office) -> None:
        """Run the training until another process coordinates, which raises Deposed, or until it has ended.

        ConfigError where this machine lacks a file that the job names, or its folder is of another run.
        """
        state, work = office.state, office.workload()
        job = job_of(work)
        check_readable(work.reads)
        assert isinstance(work.settings, TrainSettings), "this is the successor for training"
        log.warning("%s", await asyncio.to_thread(open_run_here, job, work.settings.run, state.trained))
        run = ElasticRun(work, office.authority, (office.host, 0), (office.node,), office.policy)
        run.take_up(state.trained, is_mirrored(work))

        async def follow(_: asyncio.Event) -> bool:
            try:
                async with keeping_steps(run, job), run.roles.kept(lambda: run.is_open):
                    await self._show(run, job, _written_down(run, job))
            except TllmError as error:
                log.error("the run ends: %s", error.message)
            return True

        self._run, self._loop = run, asyncio.get_running_loop()
        try:
            await office.coordinate(run, follow)
        finally:
            self._run = None

    def stop(self) -> bool:
        """If this process coordinates a run, let it save after the step that it takes, and end; whether it does. From
        any thread."""
        run, loop = self._run, self._loop
        if run is None or loop is None:
            return False
        loop.call_soon_threadsafe(run.stop)
        return True


def open_run_here(job: Job, name: str, trained: TrainedSteps | None) -> str:
    """Make the run's folder on this machine, if it is not there; in words where the run writes from now on.

    `name` is the run's. ConfigError where the folder is of another run, or where the run would not begin here with the
    tokenizer that it has.
    """
    folder, host = Path(job.output_dir), socket.gethostname()
    if (found := run_name(job)) and found != name:
        raise ConfigError(
            f"{folder.resolve()} on {host} is the folder of another run", "give each run an output_dir of its own"
        )
    open_initial_model(job, name)
    if trained is None:
        return f"metrics and saves go to {folder.resolve()} on {host}"
    if digest_of(folder / FOLDER) != trained.beginning:
        raise ConfigError(
            f"{folder.resolve() / FOLDER} on {host} is not what the run in {trained.written} began with",
            f"copy {FOLDER} from there: its tokenizer, say, is another one",
        )
    if last_step(folder) >= trained.step:
        return f"metrics and saves go on in {folder.resolve()}, which {host} shares or had before"
    return (
        f"metrics and saves go to {folder.resolve()} on {host} from now on; metrics of steps up to {trained.step} are "
        f"in {trained.written}"
    )


async def _written_down(run: ElasticRun, job: Job) -> Events:
    """The run's events, each beginning written down in its folder."""
    folder = Path(job.output_dir)
    async for event in run.events():
        if isinstance(event, RunBegan):
            start = start_now(event.step, run.plan)
            if (folder / JOB).is_file():
                add_start(folder, start)
            else:
                write_start(folder, ResolvedJob(job, dict.fromkeys(TYPES, TAKEN_OVER)), start)
        yield event
