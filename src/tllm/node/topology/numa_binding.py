"""NUMA binding: which processors each of several ranks of one machine runs on, so that none takes another's cores and
each has its memory next to it.

Linux places memory on the NUMA node of the thread that writes to it first. A rank that is bound before its threads
begin has its weights on its own node for as long as it lives. Ranks next to each other in the plan, as those of one
tensor-parallel stage are, are next to each other on the machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from tllm.core.errors import ConfigError, counted
from tllm.node.topology.machine_topology import MachineTopology, ProcessorCore, numa_nodes
from tllm.node.topology.read_topology import read_processors
from tllm.node.topology.system_files import cpu_list

log = logging.getLogger("tllm.node")

NumaBinding = Literal["auto", "exclusive", "node", "none"]
"""`exclusive` and `node` mean what they mean to torchrun: cores of its own for each rank, or its NUMA node's cores."""

CLAIM = "\0tllm-numa-binding"
"""The name of an abstract socket of Linux: one process of a machine has it, until it ends."""

Cores = Sequence[ProcessorCore]


@dataclass(frozen=True)
class BoundRanks:
    """The processors of each rank, () for no binding at all; then `reason` says why not, "" where there is no need."""

    cpus: tuple[tuple[int, ...], ...] = ()
    reason: str = ""

    def of(self, place: int) -> tuple[int, ...]:
        """The processors of one rank, () where it is not bound."""
        return self.cpus[place] if place < len(self.cpus) else ()


def check_numa_binding(asked: str) -> None:
    """ConfigError for a word that is none of `NumaBinding`."""
    if asked not in get_args(NumaBinding):
        raise ConfigError(f"numa_binding is {asked!r}", f"give one of {', '.join(get_args(NumaBinding))}")


@contextlib.contextmanager
def binding_of(asked: NumaBinding, ranks: int, threads: int) -> Iterator[BoundRanks]:
    """How so many ranks of this machine are bound, until the block ends; each computes with so many threads.

    Of the processes of a machine that bind by themselves (`auto`) only the first does: two that do not know of each
    other would put their ranks on the same cores.
    """
    if asked == "none" or ranks < 2 or not hasattr(os, "sched_setaffinity"):
        if asked in ("exclusive", "node") and ranks > 1:
            log.warning("--numa-binding %s: this system binds no process to processors", asked)
        yield BoundRanks()
        return
    found = bind_ranks(read_processors(), asked, ranks, threads)
    with contextlib.ExitStack() as held:
        if found.cpus and not _claim(held):
            if asked == "auto":
                found = BoundRanks(reason="another run on this machine has bound its workers")
            else:
                log.warning("another run on this machine has bound its workers too, perhaps to the same cores")
        if found.cpus:
            log.info("workers are bound to processors %s", " and ".join(map(cpu_list, found.cpus)))
        elif found.reason:
            log.log(logging.INFO if asked == "auto" else logging.WARNING, "workers are not bound: %s", found.reason)
        yield found


def bind(cpus: Sequence[int]) -> None:
    """Bind this process, which has no threads yet, to these processors; to none of them if they are gone."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # a control group has less than it had a moment ago
        log.warning("cannot be bound to processors %s (%s) and runs on any", cpu_list(cpus), error.strerror)


def bind_ranks(topology: MachineTopology, asked: NumaBinding, ranks: int, threads: int) -> BoundRanks:
    """Divide the processors that this process may use among ranks.

    Every rank has whole cores, so that no two share one, and at least as many processors as threads; where the NUMA
    nodes have room for that, it has them on one node. If cores are too few for it, nobody is bound. `auto` binds on
    machines of several NUMA nodes only: elsewhere the system's scheduler does as well, and can make room for others.
    """
    cores = topology.usable
    nodes = numa_nodes(cores)
    if not cores:
        return BoundRanks(reason="this system does not tell which cores it has")
    if asked == "none" or ranks < 2 or (asked == "auto" and len(nodes) < 2):
        return BoundRanks()
    if len(cores) < ranks:
        return BoundRanks(reason=f"{counted(ranks, 'worker shares', 'workers share')} {counted(len(cores), 'core')}")
    divide = _by_nodes if ranks >= len(nodes) else _of_several_nodes
    for way in (divide(cores, ranks), _evenly(cores, ranks)):
        shares = [_on_one_node(share, threads) for share in way]
        if min(map(_processors, shares)) >= threads:
            if asked == "node":
                shares = [[core for core in cores if core.node in numa_nodes(share)] for share in shares]
            return BoundRanks(tuple(tuple(sorted(cpu for core in share for cpu in core.cpus)) for share in shares))
    return BoundRanks(
        reason=f"{ranks} workers of {threads} threads each need more than the {_processors(cores)} processors there are"
    )


def _by_nodes(cores: Cores, ranks: int) -> list[Cores]:
    """Each rank on one node: so many on each as make the smallest share largest (D'Hondt's method)."""
    by_node = {node: [core for core in cores if core.node == node] for node in numa_nodes(cores)}
    count = dict.fromkeys(by_node, 0)
    for _ in range(ranks):
        count[max(by_node, key=lambda node: len(by_node[node]) / (count[node] + 1))] += 1
    return [share for node, many in count.items() if many for share in _of_each_kind(by_node[node], many)]


def _of_each_kind(cores: Cores, ranks: int) -> list[Cores]:
    """Equal parts of one node, each with as many performance and efficiency cores as the others.

    Of one kind the last have one more where they cannot be equal, of the other the first.
    """
    kinds = sorted({core.kind for core in cores})
    parts = [_evenly([core for core in cores if core.kind == kind], ranks, kind == kinds[0]) for kind in kinds]
    return [[core for part in share for core in part] for share in zip(*parts, strict=True)]


def _of_several_nodes(cores: Cores, ranks: int) -> list[Cores]:
    """Each rank on nodes of its own."""
    nodes = numa_nodes(cores)
    bounds = [len(nodes) * i // ranks for i in range(ranks + 1)]
    return [[core for core in cores if core.node in nodes[a:b]] for a, b in pairwise(bounds)]


def _evenly(cores: Cores, ranks: int, is_first_longer: bool = False) -> list[Cores]:
    """Runs of cores, as long as each other but for one core, in the order of NUMA nodes and caches."""
    ordered, more = sorted(cores, key=_place), ranks - 1 if is_first_longer else 0
    bounds = [(len(ordered) * i + more) // ranks for i in range(ranks + 1)]
    return [ordered[a:b] for a, b in pairwise(bounds)]


def _on_one_node(share: Cores, threads: int) -> Cores:
    """Of a share that spans NUMA nodes its part of one node, the first on which all threads have room."""
    parts = [[core for core in share if core.node == node] for node in numa_nodes(share)]
    return next((part for part in parts if _processors(part) >= threads), share)


def _processors(cores: Cores) -> int:
    return sum(len(core.cpus) for core in cores)


def _place(core: ProcessorCore) -> tuple[int, int, int, tuple[int, ...]]:
    return core.node, core.socket, core.cache, core.cpus


def _claim(held: contextlib.ExitStack) -> bool:
    """Take the machine for this process until the block ends; False where another has it."""
    claim = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        claim.bind(CLAIM)
    except OSError:
        return False
    return True
