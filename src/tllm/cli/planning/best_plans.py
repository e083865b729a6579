"""`tllm plan --goal`: the best plans for a cluster, what each would take, and why."""

from __future__ import annotations

import argparse
import sys

from tllm.api.engine_options import draft_options, read_spec
from tllm.cli.arguments.options import add_acceptance, add_cluster_address, add_device, add_speculation
from tllm.cli.arguments.parser import new_file, user_path, whole
from tllm.cli.arguments.running_cluster import add_running_cluster
from tllm.cli.display.serving_plans import show_serving
from tllm.cli.display.training_plans import show_training
from tllm.cli.planning.live_survey import survey_for
from tllm.core.errors import ConfigError, counted
from tllm.planner.cluster.cluster_file import read_cluster
from tllm.planner.measured.survey import Survey, cluster_of

BATCH, SEQ = 64, 512
"""Rows of a step, and tokens of a row, that a plan to train is chosen for where nobody says."""


def add_goal(parser: argparse.ArgumentParser) -> None:
    """What to choose a plan for."""
    group = parser.add_argument_group("choosing a plan")
    group.add_argument("--goal", choices=("serve", "train"), help="what the plan is for")
    live = group.add_mutually_exclusive_group()
    live.add_argument("--cluster", type=user_path, metavar="FILE", help="TOML file with the machines and their links")
    live.add_argument("--nodes", type=whole, metavar="N", help="instead: measure N machines, this one included")
    live.add_argument("--live", action="store_true", help="instead: those of a running server (--host, --port)")
    live.add_argument("--local", type=whole, metavar="N", help="instead: measure N worker processes here")
    add_cluster_address(group)
    group.add_argument("--threads", type=whole, metavar="N", help="with --nodes or --local: of each worker here")
    add_device(group)
    add_running_cluster(group, "with --live: ")
    group.add_argument(
        "--keep", type=user_path, metavar="DIR", help="keep there what was measured; it counts again (no)"
    )
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one key of a job that is planned; repeatable"
    )
    group.add_argument("--top", type=whole, default=5, metavar="N", help="plans to show (%(default)s)")
    group.add_argument("--explain", action="store_true", help="show where the time of the best plan goes")
    group.add_argument("--svg", type=new_file, metavar="FILE", help="draw the best plan's timeline here")
    _add_requests(group, "serve: ")
    add_speculation(group)
    group.add_argument("--batch", type=whole, default=BATCH, metavar="N", help="train: rows of a step (%(default)s)")
    group.add_argument("--seq", type=whole, default=SEQ, metavar="N", help="train: tokens of a row (%(default)s)")


def add_load(parser: argparse.ArgumentParser) -> None:
    """What a server's plan is chosen for."""
    group = parser.add_argument_group("choosing a plan, where none is given")
    _add_requests(group, "")
    group.add_argument(
        "--keep", type=user_path, metavar="DIR", help="keep there what was measured and predicted; it counts again (no)"
    )


def _add_requests(group: argparse._ArgumentGroup, goal: str) -> None:
    group.add_argument("--prompt", type=whole, default=512, metavar="N", help=f"{goal}tokens of a prompt (512)")
    group.add_argument("--reply", type=whole, default=128, metavar="N", help=f"{goal}tokens of a reply (128)")
    group.add_argument("--concurrency", type=whole, default=1, metavar="N", help=f"{goal}requests at once (1)")
    add_acceptance(group, goal)


def nodes_beside_others(survey: Survey) -> list[str]:
    """A line for each node that was measured while other programs ran on its machine."""
    return [
        f"{node.node} was measured beside other programs: its {counted(node.threads, 'thread')} had "
        f"{node.busy:.1f} processors on an average. Seconds are longer and rates lower than what it does alone"
        for node in survey.nodes
        if node.is_beside_others
    ]


def choose(args: argparse.Namespace) -> int:
    """Choose, and print."""
    machines = args.cluster or args.nodes or args.local or args.live
    for name, given in (("--goal", args.goal), ("--cluster", machines)):
        if not given:
            raise ConfigError(
                f"{name} is left out",
                "give --goal serve|train, and --cluster FILE, --nodes N (which are then measured) or --live",
            )
    spec = read_spec(args.model, args.quantize, args.dequantize)
    draft_options(args.model, spec, args.speculative_config)
    if args.cluster:
        cluster = read_cluster(args.cluster)
    else:
        survey = survey_for(args, spec)
        for line in nodes_beside_others(survey):
            print(line, file=sys.stderr)
        cluster = cluster_of(survey, spec)
    show = show_serving if args.goal == "serve" else show_training
    show(args, spec, cluster)
    return 0
