"""`tllm plan --goal`: the best plans for a cluster, what each would take, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from tllm.cli.options import read_spec
from tllm.cli.parser import whole
from tllm.cli.plan_serving import show_serving
from tllm.cli.plan_training import show_training
from tllm.ground.errors import ConfigError
from tllm.planner.cluster_file import read_cluster


def add_goal(parser: argparse.ArgumentParser) -> None:
    """What to choose a plan for."""
    group = parser.add_argument_group("choosing a plan")
    group.add_argument("--goal", choices=("serve", "train"), help="what the plan is for")
    group.add_argument("--cluster", type=Path, metavar="FILE", help="TOML file with the machines and their links")
    group.add_argument("--top", type=whole, default=5, metavar="N", help="plans to show (%(default)s)")
    group.add_argument("--explain", action="store_true", help="show where the time of the best plan goes")
    group.add_argument("--svg", type=Path, metavar="FILE", help="draw the best plan's timeline here")
    group.add_argument("--prompt", type=whole, default=512, metavar="N", help="serve: tokens of a prompt (%(default)s)")
    group.add_argument("--reply", type=whole, default=128, metavar="N", help="serve: tokens of a reply (%(default)s)")
    group.add_argument("--concurrency", type=whole, default=1, metavar="N", help="serve: requests at once (1)")
    group.add_argument("--batch", type=whole, default=64, metavar="N", help="train: rows of a step (%(default)s)")
    group.add_argument("--seq", type=whole, default=512, metavar="N", help="train: tokens of a row (%(default)s)")


def choose(args: argparse.Namespace) -> int:
    """Choose, and print."""
    for name, given in (("--goal", args.goal), ("--cluster", args.cluster)):
        if not given:
            raise ConfigError(f"{name} is left out", "a plan is chosen with --goal serve|train and --cluster FILE")
    spec, cluster = read_spec(args.model), read_cluster(args.cluster)
    show = show_serving if args.goal == "serve" else show_training
    show(args, spec, cluster)
    return 0
