"""A training run followed to its end: shown on the terminal and on a page, by the command that began it or by a node
that coordinates it now."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tllm.cli.display.run_display import RunDisplay
from tllm.cli.planning.run_page import RunPage
from tllm.core.disk import print_line
from tllm.core.errors import INTERRUPTED, ConfigError
from tllm.server.http.settings import ServerSettings
from tllm.training.report.events import (
    RunBegan,
    RunEnded,
    RunEvent,
    RunLostRank,
    RunResumed,
    RunSaved,
    RunStepped,
    RunWaits,
)

if TYPE_CHECKING:
    from tllm.node.replication.replica_host import Successors
    from tllm.node.train.elastic_run import ElasticRun
    from tllm.node.train.takeover import TrainingSuccessor
    from tllm.training.job.job import Job

log = logging.getLogger("tllm.node")

Events = AsyncGenerator[RunEvent, None]


async def follow_run(events: Events, page: RunPage, job: Job, quiet: bool) -> int:
    """Show what the run of `page` tells until it ends; the exit code, 0 only where all steps are done."""
    code, run, watch = INTERRUPTED, page.run, page.watch
    assert run is not None, "its ranks are up"
    folder = Path(job.output_dir)
    with ExitStack() as stack:
        display = stack.enter_context(RunDisplay(job.max_steps, quiet))
        if watch is not None:
            stack.enter_context(closing(watch))
        async for event in events:
            page.take(event)
            match event:
                case RunBegan():
                    display.began(event, folder)
                case RunStepped():
                    display.stepped(event.record)
                    if watch is not None and (said := watch.stepped(event.record, run)):
                        display.told(said)
                        page.told(said, "warning")
                case RunSaved():
                    display.saved(event)
                case RunWaits():
                    display.told(f"step {event.step + 1} waits for {event.reason}")
                case RunLostRank():
                    display.lost(event)
                case RunResumed():
                    display.resumed(event)
                    if watch is not None:
                        watch.resumed(event.plan)
                case RunEnded():
                    display.ended(event, job)
                    code = 0 if event.final else INTERRUPTED
    if watch is not None:
        watch.conclude(folder)
    return code


@dataclass(frozen=True)
class TakenOverRun:
    """Shows a run that this process has come to coordinate, on a page too if it has `settings`."""

    settings: ServerSettings | None
    quiet: bool

    async def __call__(self, run: ElasticRun, job: Job, events: Events) -> None:
        page = RunPage(job, run.coordinator.work.plan.world_size)
        page.run = run
        async with AsyncExitStack() as stack:
            if self.settings is not None:
                try:
                    url = await stack.enter_async_context(page.serving(self.settings))
                    print_line(f"the run's page is at {url}")
                except ConfigError as error:  # of an address; the run goes on without the page
                    log.error("there is no page of the run: %s", error)
            await follow_run(events, page, job, self.quiet)


def successors(settings: ServerSettings | None, quiet: bool) -> tuple[Successors, TrainingSuccessor]:
    """What a node does with the work of a cluster that it comes to coordinate, and of these what trains."""
    from tllm.cluster.settings import EngineSettings, TrainSettings
    from tllm.node.serve.takeover import take_over_serving
    from tllm.node.train.takeover import TrainingSuccessor

    training = TrainingSuccessor(TakenOverRun(settings, quiet))
    return {EngineSettings: take_over_serving, TrainSettings: training}, training
