"""`--replicas-of-coordinator`: how many processes know the cluster's state."""

from __future__ import annotations

from argparse import _ActionsContainer

from tllm.cli.arguments.parser import whole
from tllm.cluster.consensus.raft_messages import REPLICAS
from tllm.core.errors import ConfigError


def add_replicas(parser: _ActionsContainer, ends: str) -> None:
    """The option; `ends` says what ends with this process where it alone knows the state."""
    parser.add_argument(
        "--replicas-of-coordinator",
        type=whole,
        metavar="N",
        help="with --nodes: processes that know the cluster's state, so that another takes over if this one dies; 1: "
        f"only this one, and {ends} ends with it (3 from 3 nodes on, else 1)",
    )


def replica_count(asked: int | None, nodes: int, alone: str = "") -> int:
    """How many there are to be: an odd number, as of two each would be needed. `alone` says why no other process could
    take over, where that is so. ConfigError where more are asked for than there can be."""
    if alone and asked not in (None, 1):
        raise ConfigError(
            f"{asked} replicas of the coordinator's state, and {alone}: none could take over",
            "leave --replicas-of-coordinator out",
        )
    if asked is None:
        return 3 if nodes >= 3 and not alone else 1
    if asked > REPLICAS or asked % 2 == 0:
        raise ConfigError(
            f"{asked} replicas of the coordinator's state: it takes an odd number up to {REPLICAS}",
            "give 3, so that any one of them may be lost, or 5 for any two",
        )
    if asked > nodes:
        raise ConfigError(
            f"{asked} replicas of the coordinator's state need as many machines, and --nodes is {nodes}",
            "give more --nodes, or fewer --replicas-of-coordinator",
        )
    return asked
