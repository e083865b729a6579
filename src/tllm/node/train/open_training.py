"""Training over nodes: a cluster opened for one run, on this machine, over several, or as a launcher started it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tllm.core.errors import ConfigError, PlanError, counted
from tllm.node.coordinator.cluster_options import DEFAULTS, ClusterOptions
from tllm.node.coordinator.forming import forming, local_names, open_authority
from tllm.node.coordinator.plan_selection import PlanChoice
from tllm.node.machine.launcher_env import Launched
from tllm.node.machine.process_facts import reachable
from tllm.node.replication.first_replica import replicated
from tllm.node.sources.launched_tasks import MEET_SECONDS, LaunchedTasks, addresses_of, threads_of
from tllm.node.train.elastic_run import ElasticRun
from tllm.node.train.replicated_steps import keeping_steps
from tllm.node.train.training_run import TrainingRun
from tllm.node.train.training_work import TrainingWork
from tllm.training.job.job_file import DEFAULT
from tllm.training.job.job_parts import check_no_auto, role_key, role_nodes

__all__ = ["OnLoss", "TrainingRun", "TrainingWork", "open_launched", "open_training"]

OnLoss = Literal["replan", "wait", "end"]
"""When a node is lost: go on with those that are left, wait for another, or end the run."""


@contextlib.asynccontextmanager
async def open_training(
    work: TrainingWork,
    options: ClusterOptions = DEFAULTS,
    *,
    choice: PlanChoice | None = None,
    on_loss: OnLoss = "end",
) -> AsyncIterator[TrainingRun]:
    """A training run whose ranks are ready to take their first step, ended with the block; `events` is to be followed.

    With a `choice` the plan of `work` only says for how many nodes to wait; theirs is chosen when they are here.
    ConfigError for replicas of a run that ends with the first loss.
    """
    if on_loss == "end" and options.replicas > 1:
        raise ConfigError(
            f"{options.replicas} replicas of the coordinator's state, and on_loss is end: any lost node ends the run",
            "leave one of them out",
        )
    if choice is None:
        check_no_auto(work.resolved.job, "no plan is chosen for this run")
    workload = work.workload(options)
    nodes = local_names(work.plan, options.local, workload.beside)
    authority = await open_authority(options.authority, options.secret)
    made = workload, authority, options.address, nodes[: work.plan.world_size]
    run = TrainingRun(*made) if on_loss == "end" else ElasticRun(*made, on_loss)
    coordinator = run.coordinator
    coordinator.selection.choice = choice
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(run, ElasticRun):
            run.must_mirror = work.resolved.origins.get("mirror_steps", DEFAULT) != DEFAULT
            await stack.enter_async_context(replicated(run, authority, options))
            await stack.enter_async_context(keeping_steps(run, work.resolved.job))
        await stack.enter_async_context(forming(run, nodes, reachable(options.address[0]), options))
        if coordinator.local is not None and on_loss != "end":
            coordinator.local.renew()
        await stack.enter_async_context(run.roles.kept(lambda: not isinstance(run, ElasticRun) or run.is_open))
        yield run


@contextlib.asynccontextmanager
async def open_launched(
    launched: Launched, work: TrainingWork, options: ClusterOptions = DEFAULTS
) -> AsyncIterator[TrainingRun]:
    """As `open_training`, in the process of rank 0 among those that a launcher has started.

    It keeps the coordinator, and starts the worker of rank 0 beside itself; the others call
    `launched_tasks.work_launched`, and find it by a file in the job's output folder. So the options `local`,
    `address`, `authority`, `secret`, `source` and `replicas` are not read, and `join_seconds` is ten minutes unless it
    is given.
    """
    plan = work.plan
    if wanted := role_nodes(work.resolved.job):
        key = role_key(work.resolved.job, next(iter(wanted)))
        raise ConfigError(
            f"{key} gives roles to nodes, and a launcher has started a process for each rank of the plan",
            "leave it out, or start tllm without the launcher",
        )
    if plan.world_size != launched.world_size:
        raise PlanError(
            f"the plan {plan} has {counted(plan.world_size, 'rank')} and the launcher started "
            f"{counted(launched.world_size, 'process', 'processes')}",
            "start as many as the plan has ranks, or change the plan",
        )
    workload = work.workload(options)
    nodes = [launched.node_of(rank) for rank in range(plan.world_size)]
    listen, host = addresses_of(launched)
    run = TrainingRun(workload, await open_authority(None), (listen, 0), nodes)
    tasks = LaunchedTasks(launched, Path(work.resolved.job.output_dir))
    found = replace(
        options,
        threads=options.threads or threads_of(launched),
        secret=None,
        source=tasks,
        join_seconds=MEET_SECONDS if options.join_seconds is None else options.join_seconds,
    )
    async with forming(run, nodes[:1], host, found):
        tasks.stop()  # everybody is here
        yield run
