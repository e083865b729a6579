"""Options for machines of a Ray cluster, in Ray's own words, and the source that they make."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from typing import TYPE_CHECKING, Any

from tllm.cli.arguments.parser import option_of
from tllm.core.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from tllm.node.sources.ray_cluster import RayRequest
    from tllm.node.sources.ray_nodes import RayNodes

RAY_SECONDS = 300.0
RAY_ONLY = dict(
    ray_address="", ray_resources=None, ray_labels=None, ray_strategy="STRICT_SPREAD", ray_seconds=RAY_SECONDS
)
"""The options, and what they are where nobody gives them."""


def resources(text: str) -> dict[str, float]:
    """The type of `--ray-resources`."""
    read = _table(text)
    if not all(
        isinstance(amount, int | float) and not isinstance(amount, bool) and amount > 0 for amount in read.values()
    ):
        raise argparse.ArgumentTypeError(f"{text!r} has an amount that is no number above 0")
    return {name: float(amount) for name, amount in read.items()}


def labels(text: str) -> dict[str, str]:
    """The type of `--ray-labels`."""
    read = _table(text)
    if not all(isinstance(selector, str) for selector in read.values()):
        raise argparse.ArgumentTypeError(f"{text!r} has a label that is no text")
    return read


def _table(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(read, dict) or not read:
        raise argparse.ArgumentTypeError(f'{text!r} is no table, as {{"gpu_box": 1}} is')
    return read


def add_ray(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--ray-address",
        default="",
        metavar="ADDRESS",
        help="with --on ray: HOST:PORT of the cluster, ray://HOST:PORT, or auto (RAY_ADDRESS, or auto)",
    )
    group.add_argument(
        "--ray-resources",
        type=resources,
        metavar="JSON",
        help='with --on ray: what is taken of each node, as \'{"CPU": 8, "gpu_box": 1}\' (all of its CPUs)',
    )
    group.add_argument(
        "--ray-labels",
        type=labels,
        metavar="JSON",
        help='with --on ray: label selectors of the nodes, as \'{"zone": "!b"}\' (any)',
    )
    group.add_argument(
        "--ray-strategy",
        choices=("STRICT_SPREAD", "SPREAD"),
        default="STRICT_SPREAD",
        help="with --on ray: one rank on a node, or several where nodes are too few (%(default)s)",
    )
    group.add_argument(
        "--ray-seconds",
        type=float,
        default=RAY_SECONDS,
        metavar="SECONDS",
        help="with --on ray: wait so long for Ray to place all, and its autoscaler to add nodes (%(default)g)",
    )


def check_ray(args: argparse.Namespace) -> None:
    """ConfigError for options of Ray without it, and for others that go without it."""
    if args.on != "ray":
        if given := [name for name, default in RAY_ONLY.items() if getattr(args, name, default) != default]:
            raise ConfigError(f"{option_of(given[0])} is for machines of a Ray cluster", "give --on ray with it")
        return
    if args.local:
        raise ConfigError(
            f"--local {args.local} starts processes here, and --on ray takes the machines of a Ray cluster",
            "leave one of them out; --nodes says how many nodes of Ray",
        )
    if not args.ray_seconds > 0:
        raise ConfigError(f"--ray-seconds is {args.ray_seconds:g}, and Ray takes some time", "give more than 0")


def ray_nodes(args: argparse.Namespace, spare: int = 0) -> tuple[RayNodes, bytes]:
    """The source for `--on ray`, connected, and the secret that its nodes join by; fills in `nodes`, all there are
    but `spare`, and `cluster_host`.

    ConfigError or ClusterError where ray is not installed, no cluster answers, or no node has what is asked for.
    """
    from tllm.cluster.join_token import SECRET_SIZE, JoinToken
    from tllm.comm.c10d.secret import secret_from_environment
    from tllm.node.machine.process_facts import WILDCARDS
    from tllm.node.sources.ray_cluster import RayCluster
    from tllm.node.sources.ray_nodes import RayNodes
    from tllm.node.worker import WorkerSettings

    request = _request(args)
    cluster = RayCluster(args.ray_address)
    if not args.nodes:
        found, alive = len(cluster.suitable(request)), len(cluster.nodes())
        if found <= spare:
            raise ClusterError(
                f"{found} of the {alive} nodes of the Ray cluster have {request}, and {spare} are to be spare",
                "add nodes, ask for less with --ray-resources, or say with --nodes how many Ray's autoscaler is to add",
            )
        args.nodes = found - spare
    if args.cluster_host in WILDCARDS:
        args.cluster_host = cluster.own_host()
    settings = WorkerSettings(
        host="",
        port=0,
        token="",
        threads=args.threads or 0,
        memory=args.memory,
        weights_cache=getattr(args, "weights_cache", ""),
        weights_cache_bytes=getattr(args, "weights_cache_size", 0),
        runs_own_code=True,
        device=getattr(args, "device", "cpu"),
    )
    secret = secret_from_environment(os.environ) or secrets.token_bytes(SECRET_SIZE)
    return RayNodes(cluster, request, settings, str(JoinToken.of_secret(secret))), secret


def _request(args: argparse.Namespace) -> RayRequest:
    from tllm.node.sources.ray_cluster import RayRequest

    asked = dict(args.ray_resources or {})
    if args.threads:
        asked.setdefault("CPU", float(args.threads))
    if args.memory:
        asked.setdefault("memory", float(args.memory))
    return RayRequest(asked, args.ray_labels or {}, args.ray_strategy, args.ray_seconds)
