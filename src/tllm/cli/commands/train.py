"""Train a model over processes of this machine, over several machines, or under torchrun or Slurm.

The job is a TOML file; --set and --plan come after it. On several machines without a plan they are measured, and the
plan with which they are predicted to be fastest is taken. Ctrl-C saves and leaves; the same command goes on from there,
and so does one with another plan.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tllm.cli.arguments.options import add_allow_mixed, add_link, add_lost_after, add_memory, wiring
from tllm.cli.arguments.parser import port, whole
from tllm.cli.commands.serve import invite
from tllm.cli.display.logs import start_log
from tllm.cli.display.progress import ShowProgress, progress
from tllm.cli.display.run_display import RunDisplay
from tllm.cli.main import INTERRUPTED
from tllm.cli.opening import LOOPBACK
from tllm.cli.planning.dry_run import dry_run
from tllm.cli.planning.plan_chooser import TrainingChooser
from tllm.cli.planning.run_watch import Watch
from tllm.cluster.heartbeat import check_lost_after
from tllm.core.errors import ConfigError, PlanError
from tllm.node.machine.launcher_env import Launched, launched
from tllm.planner.measured.survey import FILE
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.train.job.initial_model import InitialModel, open_initial_model, spec_of
from tllm.train.job.job_file import DEFAULT, ResolvedJob, read_job
from tllm.train.job.job_parts import can_mirror
from tllm.train.job.run_folder import RunStart, commit_here, write_start
from tllm.train.report.events import RunBegan, RunEnded, RunLostRank, RunResumed, RunSaved, RunStepped
from tllm.train.report.metrics import check_sinks

if TYPE_CHECKING:
    from tllm.node.coordinator.coordinator import PlanChoice
    from tllm.node.train.open_training import TrainingRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", type=Path, nargs="?", metavar="JOB", help="TOML file (docs/guides/train.md lists its keys)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one key of the job; repeatable, the last wins"
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="who computes what: dp=2 (replicas), pp=2, tp=2, cp=2, ep=2, zero=1, schedule=zero_bubble, sequence=true, "
        "recompute=layer, offload=disk and more, joined by commas; or a JSON file",
    )
    parser.add_argument(
        "--replan", action="store_true", help="move to a plan that is faster when machines or links change in mid-run"
    )
    parser.add_argument("--dry-run", action="store_true", help="show plan, memory and predicted time, and end")
    where = parser.add_argument_group("machines")
    count = where.add_mutually_exclusive_group()
    count.add_argument("--nodes", type=whole, metavar="N", help="train on N machines, this one included")
    count.add_argument("--local", type=whole, metavar="N", help="N worker processes here (a process for each rank)")
    add_allow_mixed(where)
    add_link(where)
    where.add_argument(
        "--cluster-host", default="0.0.0.0", metavar="HOST", help="with --nodes: address that the others reach (all)"
    )
    where.add_argument("--cluster-port", type=port, default=0, metavar="PORT", help="with --nodes (any free one)")
    where.add_argument(
        "--cluster-folder",
        type=Path,
        metavar="DIR",
        help="with --nodes and --cluster-port: keep the cluster's authority, so that nodes find a command again that "
        "was killed, and go on with what they have in memory (no)",
    )
    where.add_argument(
        "--on-loss",
        choices=("replan", "wait", "end"),
        help="of a node: go on with what is left (replan, the default), wait for another, or end (under a launcher)",
    )
    add_lost_after(where)
    add_memory(where)
    parser.add_argument("--threads", type=whole, metavar="N", help="threads of each worker (cores / workers here)")
    parser.add_argument("--quiet", action="store_true", help="no line for each step")


def run(args: argparse.Namespace) -> int:
    from tllm.train.job.combinations import check_combination  # with torch, which --help does without

    check_lost_after(args.lost_after)
    start_log(args.debug, quiet=True)
    wiring(args)
    resolved = read_job(args.job, args.set, args.plan)
    check_sinks(resolved.job.report_to)
    spec = spec_of(resolved.job)
    here = launched(os.environ)
    if here is not None and (args.nodes or args.local):
        raise ConfigError(
            f"a launcher has started {here.world_size} processes, and --nodes or --local would start others",
            "leave them out, or start tllm without the launcher",
        )
    if args.replan and (here is not None or args.on_loss == "end"):
        raise ConfigError(
            "--replan moves a run by what makes it outlive its nodes, which --on-loss end and a launcher do without",
            "leave one of them out",
        )
    if here is not None and args.on_loss not in (None, "end"):
        raise ConfigError(
            f"--on-loss is {args.on_loss} and a launcher, which ends all ranks with one, has started this process",
            "leave it out, or start tllm without the launcher",
        )
    if args.cluster_folder is not None and not (args.nodes and args.cluster_port and args.on_loss != "end"):
        raise ConfigError(
            "--cluster-folder is for nodes to find the run again that outlives them, where they look for it",
            "give --nodes and --cluster-port with it, and no --on-loss end",
        )
    plan = _plan(resolved, spec, args.nodes or args.local or (here.world_size if here else None))
    check_combination(resolved.job, plan, spec)
    lasts = here is None and args.on_loss != "end"
    if args.dry_run:
        chooser = _chooser(resolved, "", spec, plan, lasts) if here is None else None
        dry_run(resolved.job, plan, spec, args.threads, lasts, chooser)
        return 0
    if here is not None and here.rank:
        from tllm.node.train.launcher_rendezvous import work_launched

        work_launched(here, Path(resolved.job.output_dir), os.environ, args.threads or 0, memory=args.memory)
        return 0
    beginning = open_initial_model(resolved.job)
    config = json.dumps(beginning.config)
    chooser = _chooser(resolved, config, beginning.spec, plan, lasts) if here is None else None
    try:
        return asyncio.run(_train(args, here, resolved, plan, beginning, chooser))
    except asyncio.CancelledError:  # told a second time
        return INTERRUPTED


async def _train(
    args: argparse.Namespace,
    here: Launched | None,
    resolved: ResolvedJob,
    plan: Plan,
    beginning: InitialModel,
    chooser: TrainingChooser | None,
) -> int:
    how = "measuring them for a plan" if chooser and not chooser.given else f"plan {plan}"
    print(f"{how}: bringing up {plan.world_size} rank{'s' if plan.world_size > 1 else ''}", flush=True)
    with ExitStack() as shown:
        tell = shown.enter_context(progress(args.quiet))
        choice = chooser.choice() if chooser else None
        async with _open(args, here, resolved, plan, beginning, tell, choice) as run:
            shown.close()  # all is loaded: the terminal is the display's
            _stop_on_signals(run)
            watch = Watch(chooser, args.replan) if chooser and chooser.chosen else None
            return await _follow(run, chooser.resolved if chooser else resolved, args.quiet, watch)


def _open(
    args: argparse.Namespace,
    here: Launched | None,
    resolved: ResolvedJob,
    plan: Plan,
    beginning: InitialModel,
    tell: ShowProgress,
    choice: PlanChoice | None,
) -> AbstractAsyncContextManager[TrainingRun]:
    """The run's ranks, on whatever machines they are asked for."""
    from tllm.node.train.open_training import open_launched, open_training

    config, spec = json.dumps(beginning.config), beginning.spec
    wires = wiring(args)
    if here is not None:
        how = dict(threads=args.threads or 0, allow_mixed=args.allow_mixed, tell=tell)
        given = dict(lost_after=args.lost_after, memory=args.memory)
        return open_launched(here, resolved, plan, config, spec, wiring=wires, **how, **given)
    joining = args.nodes - 1 if args.nodes else 0
    return open_training(
        resolved,
        plan,
        config,
        spec,
        local=plan.world_size - joining,
        threads=args.threads or 0,
        allow_mixed=args.allow_mixed,
        address=(args.cluster_host, args.cluster_port) if joining else LOOPBACK,
        invite=lambda *how: invite(joining, *how),
        tell=tell,
        choice=choice,
        on_loss=args.on_loss or "replan",
        lost_after=args.lost_after,
        wiring=wires,
        memory=args.memory,
        authority=args.cluster_folder,
    )


async def _follow(run: TrainingRun, resolved: ResolvedJob, quiet: bool, watch: Watch | None) -> int:
    """Show and write down what the run tells until it ends; the exit code, 0 only where all steps are done."""
    code = INTERRUPTED
    job, folder = resolved.job, Path(resolved.job.output_dir)
    with ExitStack() as stack:
        display = stack.enter_context(RunDisplay(job.max_steps, quiet))
        if watch is not None:
            stack.enter_context(closing(watch))
        async for news in run.news():
            match news:
                case RunBegan():
                    now = datetime.now(UTC).isoformat(timespec="seconds")
                    plan, commit = run.plan, commit_here()
                    start = RunStart(
                        time=now, step=news.step, plan=str(plan), world_size=plan.world_size, commit=commit
                    )
                    write_start(folder, resolved, start)
                    display.began(news, folder)
                case RunStepped():
                    display.stepped(news.record)
                    if watch is not None and (said := watch.stepped(news.record, run)):
                        display.told(said)
                case RunSaved():
                    display.saved(news)
                case RunLostRank():
                    display.lost(news)
                case RunResumed():
                    display.resumed(news)
                    if watch is not None:
                        watch.resumed(news.plan)
                case RunEnded():
                    display.ended(news, folder)
                    code = 0 if news.final else INTERRUPTED
    if watch is not None:
        watch.conclude(folder)
    return code


def _chooser(resolved: ResolvedJob, config: str, spec: ModelSpec, plan: Plan, outlives: bool) -> TrainingChooser | None:
    """What chooses the plan where none is given for several nodes; not where the plan decides what is learned.

    A plan that is given is predicted if the run's folder knows its machines.
    """
    job = resolved.job
    if job.local_steps > 1 or job.delay_steps or plan.servers:
        return None
    mirrored = outlives and can_mirror(job, plan.servers)
    if resolved.origins["plan"] == DEFAULT:
        nodes = plan.world_size
        chooser = TrainingChooser(resolved, config, spec, nodes, plan if nodes == 1 else None, mirrored)
        return chooser if nodes > 1 or chooser.recalled() else None  # nobody asked to wait until one is measured
    is_known = (Path(job.output_dir) / FILE).is_file()
    return TrainingChooser(resolved, config, spec, 0, plan, mirrored) if is_known else None


def _plan(resolved: ResolvedJob, spec: ModelSpec, count: int | None) -> Plan:
    """The job's plan; without one a replica on each of `count` machines or processes, until one is chosen."""
    text = resolved.job.plan
    if resolved.origins["plan"] == DEFAULT and count:
        text = f"dp={count}"
    plan = Plan.parse(text, spec.num_layers)
    if count and plan.world_size != count:
        raise PlanError(
            f"the plan {plan} has {plan.world_size} ranks for {count} machines or processes",
            "give a plan with a rank for each, or leave it out for a replica on each",
        )
    return plan


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
        print("\nsaving, then leaving; once more ends at once", flush=True)
        answer(end)
        run.stop()

    def end() -> None:
        answer(lambda: None)
        task.cancel()

    answer(stop)
