"""Train a model over processes of this machine, over several machines, or under torchrun or Slurm.

The job is a TOML file; --set and --plan come after it. On several machines without a plan they are measured, and the
plan with which they are predicted to be fastest is taken; the job may let some of them teach or sample instead
(teacher_nodes, rollout_nodes). Ctrl-C saves and leaves; the same command goes on from there, and so does one with
another plan. Under srun the first task is the first machine, and the others join it, and so under torchrun with
--on-loss replan; with --on ray the ranks run on nodes of a Ray cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tllm.api.trainer import Trainer
from tllm.cli.arguments.node_sources import add_on, be_first, from_elsewhere, from_ray, joining, launched_here
from tllm.cli.arguments.options import (
    add_allow_mixed,
    add_api_key,
    add_cluster_address,
    add_device,
    add_link,
    add_lost_after,
    add_memory,
    add_numa_binding,
    wiring,
)
from tllm.cli.arguments.parser import user_path, whole
from tllm.cli.arguments.replica_count import add_replicas, replica_count
from tllm.cli.arguments.run_page_options import add_page, page_settings
from tllm.cli.commands.join import REJOIN_SECONDS, join_again, join_successor
from tllm.cli.display.logs import start_log
from tllm.cli.display.progress import ShowProgress, loading
from tllm.cli.display.run_display import product_of
from tllm.cli.planning.dry_run import Computing, dry_run
from tllm.cli.planning.followed_run import follow_run
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.cli.planning.run_page import RunPage
from tllm.cli.planning.run_watch import Watch
from tllm.cluster.consensus.replica import Deposed
from tllm.cluster.heartbeat import check_lost_after
from tllm.core.disk import print_line
from tllm.core.errors import INTERRUPTED, ConfigError, counted
from tllm.node.coordinator.cluster_options import LOOPBACK, ClusterOptions
from tllm.node.machine.launcher_env import Launched
from tllm.planner.measured.survey import FILE
from tllm.training.job.job import Job
from tllm.training.job.job_file import DEFAULT
from tllm.training.job.job_parts import can_mirror, role_nodes, row_file

if TYPE_CHECKING:
    from tllm.node.train.open_training import TrainingRun

ROWS_SECONDS = 86400.0
"""How long the other tasks of a launcher look for the first where that calls functions which give rows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", type=user_path, nargs="?", metavar="JOB", help="TOML file (docs/reference/job-keys.md lists its keys)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one key of the job; repeatable, the last wins"
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="who computes what: dp=2 (replicas), pp=2, tp=2, cp=2, ep=2, zero=1, schedule=zero_bubble, sequence=true, "
        "tensor=2d, recompute=layer, offload=disk and more, joined by commas; or a JSON file",
    )
    parser.add_argument(
        "--replan", action="store_true", help="move to a plan that is faster when machines or links change in mid-run"
    )
    parser.add_argument("--dry-run", action="store_true", help="show plan, memory and predicted time, and end")
    where = parser.add_argument_group("machines")
    count = where.add_mutually_exclusive_group()
    count.add_argument("--nodes", type=whole, metavar="N", help="train on N machines, this one included")
    count.add_argument("--local", type=whole, metavar="N", help="N worker processes here (a process for each rank)")
    add_on(where)
    add_allow_mixed(where)
    add_link(where)
    add_cluster_address(where)
    where.add_argument(
        "--cluster-folder",
        type=user_path,
        metavar="DIR",
        help="with --nodes and --cluster-port: keep the cluster's authority and who else knows its state: the same "
        "command finds its nodes again, with what they have in memory, or joins them where another machine coordinates "
        "meanwhile (no)",
    )
    add_replicas(where, "the run")
    where.add_argument(
        "--on-loss",
        choices=("replan", "wait", "end"),
        help="of a node: go on with what is left (replan, the default), wait for another, or end (the default under "
        "torchrun)",
    )
    add_lost_after(where)
    add_memory(where)
    add_device(where)
    page = parser.add_argument_group("page")
    add_page(page, "of the run, while it runs,")
    add_api_key(page)
    parser.add_argument("--threads", type=whole, metavar="N", help="threads of each worker (cores / workers here)")
    add_numa_binding(parser)
    parser.add_argument("--quiet", action="store_true", help="no line for each step")


def run(args: argparse.Namespace) -> int:
    check_lost_after(args.lost_after)
    start_log(args.debug, quiet=True)
    here = launched_here(args)
    tasks = here if here is not None and (here.is_elastic or args.on_loss == "replan") else None
    here = None if tasks is not None else here  # a launcher that ends all ranks with one
    _check_machines(args, here)
    if tasks is not None:
        be_first(args, tasks)
    ray = from_ray(args)
    may_return = tasks is None and args.nodes and args.cluster_folder and not args.dry_run
    if may_return and (code := join_again(args, None, page_settings(args), device=args.device)) is not None:
        return code
    wiring(args)
    ranks = args.nodes or args.local or (here.world_size if here else None)
    trainer = Trainer(args.job, plan=args.plan, overrides=args.set, ranks=ranks)
    job = trainer.resolved.job
    outlives = here is None and args.on_loss != "end"
    if args.dry_run:
        chooser = _chooser(args, trainer, "", outlives) if here is None else None
        place = here.local_rank if here is not None else 0
        computing = Computing(args.threads, args.device, place)
        dry_run(job, trainer.plan, trainer.spec, computing, outlives, chooser, measuring_command(args, trainer))
        return 0
    if args.nodes and tasks is None and (final := final_model(job)):  # and the machines that it had may be gone
        print(f"has taken its {counted(job.max_steps, 'step')}; {product_of(job)} is in {final}", flush=True)
        return 0
    if (other := tasks or here) is not None and other.rank:
        from tllm.node.sources.launched_tasks import MEET_SECONDS, PLAIN, work_launched

        # Rank 0 calls functions that give rows before it can be found.
        gives_rows = any(row_file(job, name) != name for name in (*job.train_files, *job.eval_files))
        seconds = ROWS_SECONDS if gives_rows else MEET_SECONDS
        own = dict(threads=args.threads or 0, memory=args.memory, device=args.device, place=other.local_rank)
        settings = msgspec.structs.replace(PLAIN, **own)
        work_launched(other, Path(job.output_dir), os.environ, settings, seconds)
        return 0
    if ray is None:
        _check_files(job)
    chooser = _chooser(args, trainer, trainer.config, outlives) if here is None else None
    try:
        return asyncio.run(_train(args, here, tasks, ray, trainer, chooser))
    except Deposed as deposed:
        return join_successor(args, deposed, None, page_settings(args), device=args.device)
    except asyncio.CancelledError:  # told a second time
        return INTERRUPTED


def measuring_command(args: argparse.Namespace, trainer: Trainer) -> str:
    """The `tllm plan` that measures as many machines as this command would use, for the same job. With nodes of
    roles it chooses for all, so that no plan is given."""
    beside = sum(wanted.count for wanted in role_nodes(trainer.resolved.job).values())
    machines = trainer.plan.world_size + beside
    words = ["tllm", "plan", str(args.job or "JOB.toml"), "--nodes" if args.nodes else "--local", str(machines)]
    words += [word for key in args.set for word in ("--set", key)]
    return shlex.join([*words, "--plan", args.plan] if args.plan and not beside else words)


def _check_files(job: Job) -> None:
    """ConfigError for a file of rows that is missing: rank 0, which reads them, is here, and says so only when all
    machines have come."""
    from tllm.training.data.dataset import check_file

    for name in (*job.train_files, *job.eval_files):
        if row_file(job, name) == name:  # not what a function gives
            check_file(Path(name))


def final_model(job: Job) -> Path | None:
    """The model of a run that has taken its steps: saved after the last, and made since. One of fewer steps stays where
    it is until another is written in its place."""
    from tllm.training.checkpoint.checkpoint import FOLDER
    from tllm.training.checkpoint.save_folders import folder_of, steps_here

    final = Path(job.output_dir) / FOLDER
    if not final.is_dir() or job.max_steps not in steps_here(final.parent):
        return None
    is_newer = final.stat().st_mtime_ns >= folder_of(final.parent, job.max_steps).stat().st_mtime_ns
    return final if is_newer else None


def _check_machines(args: argparse.Namespace, here: Launched | None) -> None:
    """Refuse options that cannot go together: who starts the ranks, and what is done when one is lost."""
    if args.replan and (here is not None or args.on_loss == "end"):
        raise ConfigError(
            "--replan moves a run by what makes it outlive its nodes, which --on-loss end and torchrun do without",
            "leave one of them out, or give --on-loss replan",
        )
    if here is not None and args.on_loss == "wait":
        raise ConfigError(
            "--on-loss is wait, and a launcher has started this process, which may start no other for one that is lost",
            "give --on-loss replan, or leave it out: the run then ends with the first loss",
        )
    if args.cluster_folder is not None and not (args.nodes and args.cluster_port and args.on_loss != "end"):
        raise ConfigError(
            "--cluster-folder is for nodes to find the run again that outlives them, where they look for it",
            "give --nodes and --cluster-port with it, and no --on-loss end",
        )


async def _train(
    args: argparse.Namespace,
    here: Launched | None,
    tasks: Launched | None,
    ray: Mapping[str, Any] | None,
    trainer: Trainer,
    chooser: TrainingChooser | None,
) -> int:
    plan, alone = trainer.plan, _alone(args, here or tasks or ray, trainer)
    replicas = replica_count(args.replicas_of_coordinator, args.nodes or 1, alone)
    how = "measuring them for a plan" if chooser and not chooser.given else f"plan {plan}"
    beside = sum(wanted.count for wanted in role_nodes(trainer.resolved.job).values())
    machines = plan.world_size + beside
    roles = f" and {counted(beside, 'node')} with a role beside them" if beside else ""
    print_line(f"{how}: bringing up {counted(plan.world_size, 'rank')}{roles}")

    folder = Path(trainer.resolved.job.output_dir)
    source = ray or joining(tasks, folder)

    def opening(on_progress: ShowProgress) -> AbstractAsyncContextManager[TrainingRun]:
        return trainer.open(
            _cluster_options(args, machines, on_progress, source, replicas),
            choice=chooser.choice() if chooser else None,
            on_loss=args.on_loss or "replan",
            wiring=wiring(args),
            launched=here,
        )

    page = RunPage(trainer.resolved.job, plan.world_size)
    async with AsyncExitStack() as stack:
        if (settings := page_settings(args)) is not None:
            url = await stack.enter_async_context(page.serving(settings))
            print_line(f"the run's page is at {url}")
        run = page.run = await stack.enter_async_context(loading(args.quiet, opening))
        _stop_on_signals(run)
        page.watch = Watch(chooser, args.replan) if chooser and chooser.chosen else None
        resolved = chooser.resolved if chooser else trainer.resolved
        return await follow_run(trainer.follow(run, resolved), page, resolved.job, args.quiet)


def _cluster_options(
    args: argparse.Namespace, machines: int, on_progress: ShowProgress, source: Mapping[str, Any], replicas: int
) -> ClusterOptions:
    """So many machines or processes; `source` says where those come from that are not here."""
    to_join = from_elsewhere(args)
    return ClusterOptions(
        **source,
        local=machines - to_join,
        threads=args.threads or 0,
        address=(args.cluster_host, args.cluster_port) if to_join else LOOPBACK,
        authority=args.cluster_folder,
        allow_mixed=args.allow_mixed,
        on_progress=on_progress,
        lost_after=args.lost_after,
        memory=args.memory,
        device=args.device,
        numa_binding=args.numa_binding,
        replicas=replicas,
        successor_seconds=REJOIN_SECONDS,
    )


def _alone(args: argparse.Namespace, elsewhere: object, trainer: Trainer) -> str:
    """Why no other machine could go on with the run, where that is so."""
    if elsewhere:
        return "Slurm, Ray or a launcher has started the ranks, which end with this process"
    if args.on_loss == "end":
        return "--on-loss end ends the run with any machine"
    job = trainer.resolved.job
    if job.rollouts is not None and job.rollouts.own_code:
        return "rewards are worked out by your own functions, which no other machine runs"
    if job.lm_eval_tasks:
        return "tasks of lm-eval are code, which no other machine runs"
    return ""


def _chooser(args: argparse.Namespace, trainer: Trainer, config: str, outlives: bool) -> TrainingChooser | None:
    """What chooses the plan, if anything does, with the links and times that were asked for."""
    chooser = _chooser_of(trainer, config, outlives)
    if chooser is not None:
        chooser.wiring = wiring(args)
        chooser.cluster = ClusterOptions(allow_mixed=args.allow_mixed, lost_after=args.lost_after, device=args.device)
    return chooser


def _chooser_of(trainer: Trainer, config: str, outlives: bool) -> TrainingChooser | None:
    """What chooses the plan where none is given for several nodes; not where the plan decides what is learned.

    A plan that is given is predicted if the run's folder knows its machines.
    """
    resolved, plan, spec = trainer.resolved, trainer.plan, trainer.spec
    job = resolved.job
    roles = role_nodes(job)
    if job.local_steps > 1 or job.delay_steps or plan.servers or (roles and resolved.origins["plan"] != DEFAULT):
        return None
    mirrored = outlives and can_mirror(job, plan.servers)
    if resolved.origins["plan"] == DEFAULT:
        nodes = plan.world_size + sum(wanted.count for wanted in roles.values())
        chooser = TrainingChooser(resolved, config, spec, nodes, plan if nodes == 1 else None, mirrored)
        return chooser if nodes > 1 or chooser.recalled() else None  # nobody asked to wait until one is measured
    is_known = (Path(job.output_dir) / FILE).is_file()
    return TrainingChooser(resolved, config, spec, 0, plan, mirrored) if is_known else None


def _stop_on_signals(run: TrainingRun) -> None:
    """The first Ctrl-C, or a scheduler's SIGTERM, saves and leaves; the next ends at once, and more change nothing.

    Without an answer here Ctrl-C would break off the loop itself, wherever it is, with all tasks that end workers.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a task trains"

    def answer(call: Callable[[], object]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, call)

    def stop() -> None:
        if run.fault is not None:  # it is another machine's by now, which this one looks for
            end()
            return
        print_line("\nsaving, then leaving; once more ends at once")
        answer(end)
        run.stop()

    def end() -> None:
        answer(lambda: None)
        task.cancel()

    answer(stop)
