"""Training over nodes: a cluster opened for one run, on this machine, over several, or as a launcher started it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

from tllm.cluster.connection import Address
from tllm.cluster.heartbeat import SILENCE_SECONDS
from tllm.cluster.settings import OUR_LINKS, TrainSettings, Wiring
from tllm.core.errors import PlanError
from tllm.node.coordinator.coordinator import PlanChoice, Tell, Workload
from tllm.node.coordinator.forming import LOOPBACK, Invite, forming, local_names, open_authority
from tllm.node.machine.launcher_env import Launched
from tllm.node.machine.process_facts import reachable
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.launcher_rendezvous import MEET_SECONDS, addresses_of, announced, meeting_file, node_of, threads_of
from tllm.node.train.training_run import TrainingRun
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.train.job.initial_model import run_name
from tllm.train.job.job import encode_job
from tllm.train.job.job_file import DEFAULT, ResolvedJob

__all__ = ["OnLoss", "TrainingRun", "open_launched", "open_training"]

OnLoss = Literal["replan", "wait", "end"]
"""When a node is lost: go on with those that are left, wait for another, or end the run."""

LINK_SECONDS = (
    600.0  # a microbatch of a large model on a slow machine, or a corpus that rank 0 reads for the first time
)


@contextlib.asynccontextmanager
async def open_training(
    resolved: ResolvedJob,
    plan: Plan,
    config: str,
    spec: ModelSpec,
    *,
    local: int | None = None,
    threads: int = 0,
    address: Address = LOOPBACK,
    authority: Path | None = None,
    allow_mixed: bool = False,
    invite: Invite | None = None,
    tell: Tell | None = None,
    join_seconds: float | None = None,
    link_seconds: float = LINK_SECONDS,
    choice: PlanChoice | None = None,
    on_loss: OnLoss = "end",
    lost_after: float = SILENCE_SECONDS,
    wiring: Wiring = OUR_LINKS,
    memory: int | None = None,
) -> AsyncIterator[TrainingRun]:
    """A training run whose ranks are ready to take their first step, ended with the block; `news` is to be followed.

    `config` is the text of the model's config.json, which `spec` was read from. The rest is as for `open_cluster`.
    """
    work = work_of(resolved, plan, config, spec, link_seconds, allow_mixed, lost_after, wiring)
    nodes = local_names(plan, local)
    made = work, await open_authority(authority), address, nodes
    run = TrainingRun(*made) if on_loss == "end" else ElasticRun(*made, on_loss)
    run.choice = choice
    if isinstance(run, ElasticRun):
        run.must_mirror = resolved.origins.get("mirror_steps", DEFAULT) != DEFAULT
    async with forming(run, nodes, reachable(address[0]), threads, invite, tell, join_seconds, memory):
        if run.local is not None and on_loss != "end":
            run.local.renew(at_hand=True)
        yield run


@contextlib.asynccontextmanager
async def open_launched(
    launched: Launched,
    resolved: ResolvedJob,
    plan: Plan,
    config: str,
    spec: ModelSpec,
    *,
    threads: int = 0,
    allow_mixed: bool = False,
    tell: Tell | None = None,
    link_seconds: float = LINK_SECONDS,
    lost_after: float = SILENCE_SECONDS,
    wiring: Wiring = OUR_LINKS,
    memory: int | None = None,
) -> AsyncIterator[TrainingRun]:
    """As `open_training`, in the process of rank 0 among those that a launcher has started.

    It keeps the coordinator, and starts the worker of rank 0 beside itself; the others call `meeting.work_launched`.
    """
    if plan.world_size != launched.world_size:
        raise PlanError(
            f"the plan {plan} has {plan.world_size} ranks and the launcher started {launched.world_size} processes",
            "start as many as the plan has ranks, or change the plan",
        )
    work = work_of(resolved, plan, config, spec, link_seconds, allow_mixed, lost_after, wiring)
    nodes = [node_of(rank) for rank in range(plan.world_size)]
    listen, host = addresses_of(launched)
    run = TrainingRun(work, await open_authority(None), (listen, 0), nodes)
    file = meeting_file(launched, Path(resolved.job.output_dir))
    with contextlib.ExitStack() as told:

        def invite(address: str, token: str) -> None:
            told.enter_context(announced(file, address, token))

        async with forming(run, nodes[:1], host, threads or threads_of(launched), invite, tell, MEET_SECONDS, memory):
            told.close()  # everybody is here
            yield run


def work_of(
    resolved: ResolvedJob,
    plan: Plan,
    config: str,
    spec: ModelSpec,
    link_seconds: float,
    allow_mixed: bool = False,
    lost_after: float = SILENCE_SECONDS,
    wiring: Wiring = OUR_LINKS,
) -> Workload:
    """What to train, as every rank is told it. A link waits for longer than a silent node is waited for."""
    plan.check(spec.num_layers)
    link_seconds = max(link_seconds, 2 * lost_after)
    job = resolved.job
    folder = Path(job.model_name_or_path) if job.model_name_or_path else None
    settings = TrainSettings(
        job=encode_job(job), threads=0, link_seconds=link_seconds, run=run_name(job), wiring=wiring
    )
    return Workload(folder, config, plan, settings, link_seconds, allow_mixed, link_seconds, lost_after)
