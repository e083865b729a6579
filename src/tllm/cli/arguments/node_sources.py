"""Where nodes come from, by a command's options and by what started it: a line to run elsewhere, tasks of srun, Ray."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from tllm.cli.arguments.ray_arguments import add_ray, check_ray, ray_nodes
from tllm.core.disk import print_line
from tllm.core.errors import ConfigError, counted
from tllm.node.machine.launcher_env import Launched, check_slurm, launched
from tllm.node.sources.node_source import JoinLine

ENGINES = ("slurm", "ray")
ANYWHERE = "0.0.0.0"
TOKEN_VARIABLE = "TLLM_JOIN_TOKEN"


def add_on(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--on",
        choices=ENGINES,
        help="where the machines come from: slurm, the tasks that srun has started (found out where srun has); ray, a "
        "running Ray cluster",
    )
    add_ray(group)


def launched_here(args: argparse.Namespace) -> Launched | None:
    """The processes of which a launcher has started this one. ConfigError where --on asks for another."""
    check_ray(args)
    if args.on == "slurm":
        check_slurm(os.environ)
    here = launched(os.environ)
    if here is not None and args.on == "ray":
        raise ConfigError(
            f"a launcher has started {counted(here.world_size, 'process', 'processes')}, and --on ray takes "
            "the machines of a Ray cluster",
            "leave it out, or start tllm without the launcher",
        )
    if here is not None and (args.nodes or args.local):
        raise ConfigError(
            f"a launcher has started {counted(here.world_size, 'process', 'processes')}, and --nodes or "
            "--local would start others",
            "leave them out, or start tllm without the launcher",
        )
    if here is not None and args.numa_binding not in ("auto", "none"):
        raise ConfigError(
            f"--numa-binding {args.numa_binding} is for workers that this command starts, and a launcher has started "
            f"{counted(here.world_size, 'process', 'processes')}",
            "let the launcher bind them: torchrun --numa-binding, srun --cpu-bind",
        )
    return here


def be_first(args: argparse.Namespace, tasks: Launched, spare: int = 0) -> None:
    """Fill in what `--nodes` and the options beside it are for the first of these tasks; so many are in reserve."""
    if spare >= tasks.world_size:
        raise ConfigError(
            f"{counted(spare, 'spare node')} of {counted(tasks.world_size, 'task')} leave none to compute",
            "start more tasks (srun --ntasks), or give fewer --spare-nodes",
        )
    from tllm.node.sources.launched_tasks import addresses_of, threads_of

    args.nodes = tasks.world_size - spare
    args.threads = args.threads or threads_of(tasks)
    if args.cluster_host == ANYWHERE:
        args.cluster_host = addresses_of(tasks)[0]


def from_elsewhere(args: argparse.Namespace) -> int:
    """How many nodes are to come to this process: all but this machine, or with Ray all."""
    if args.on == "ray":
        return int(args.nodes)
    return args.nodes - 1 if args.nodes else 0


def from_ray(args: argparse.Namespace, spare: int = 0) -> dict[str, Any] | None:
    """Options of a cluster whose nodes come from Ray, None without `--on ray`; fills in `--nodes` and the like."""
    if args.on != "ray":
        return None
    from tllm.node.sources.launched_tasks import MEET_SECONDS

    source, secret = ray_nodes(args, spare)
    return dict(source=source, secret=secret, join_seconds=args.ray_seconds + MEET_SECONDS)


def joining(tasks: Launched | None, folder: Path) -> dict[str, Any]:
    """Options of a cluster whose other nodes are these tasks, which meet in a folder, or come by the line that is
    printed."""
    from tllm.comm.c10d.secret import secret_from_environment
    from tllm.node.sources.launched_tasks import MEET_SECONDS, LaunchedTasks

    secret = secret_from_environment(os.environ)
    if tasks is not None:
        return dict(source=LaunchedTasks(tasks, folder), secret=secret, join_seconds=MEET_SECONDS)
    return dict(source=JoinLine(_invite if secret is None else _invite_by_secret), secret=secret)


def join_text(count: int, address: str, token: str, command: str = "join") -> str:
    """What the operator is to run on so many other machines."""
    others = f"each of {count} other machines" if count > 1 else "one other machine"
    return f"run this on {others} (the token is good for an hour):\n\n  tllm {command} {address} --token {token}\n"


def given_token(args: argparse.Namespace) -> str:
    """The join token: what --token says, a line of stdin where that is "-", else the variable; "" for none."""
    return sys.stdin.readline().strip() if args.token == "-" else args.token or os.environ.get(TOKEN_VARIABLE, "")


def _invite(count: int, address: str, token: str) -> None:
    print_line(join_text(count, address, token))


def _invite_by_secret(count: int, address: str, token: str) -> None:
    """Where machines know the secret, the token is not shown."""
    others = f"{count} other machines that know" if count > 1 else "one other machine that knows"
    print_line(f"waits for {others} TLLM_SECRET. Run there:\n\n  tllm join {address}\n")
