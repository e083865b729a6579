"""Chooses the algorithm of a collective: `LengthChoice` by the message alone, `MeasuredChoice` by the measured links.

All ranks of a group must choose alike. So a choice depends only on the message's length, dtype and operation, which all
ranks know, and on numbers that are the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from tllm.comm.collectives import message_rounds as rounds
from tllm.comm.collectives.all_reduce import (
    LATENCY_BYTES,
    AllReduceAlgorithm,
    HierarchicalAllReduce,
    WeightedAllReduce,
    balanced_shares,
    hosts_are_subtrees,
    one_shot_all_reduce,
    one_shot_limit,
    ring_all_reduce,
    tree_all_reduce,
    two_step_all_reduce,
)
from tllm.comm.collectives.fold import widens
from tllm.comm.collectives.group_links import GroupLinks
from tllm.comm.collectives.network_model import NetworkModel
from tllm.comm.collectives.reduce_and_broadcast import (
    direct_broadcast,
    direct_reduce,
    scatter_all_gather_broadcast,
    tree_broadcast,
    tree_reduce,
)
from tllm.comm.collectives.reduce_scatter import (
    AllGatherAlgorithm,
    HierarchicalAllGather,
    HierarchicalReduceScatter,
    ReduceScatterAlgorithm,
    direct_all_gather,
    direct_reduce_scatter,
)

ReduceAlgorithm = Callable[[torch.Tensor, GroupLinks, str, int], None]
"""algorithm(x, links, op, root)"""

BroadcastAlgorithm = Callable[[torch.Tensor, GroupLinks, int], None]
"""algorithm(x, links, root)"""

T = TypeVar("T")

CHUNKS = 8
"""Of a weighted all-reduce. Its first and last round use each link in one direction only, which costs a ninth."""


class AlgorithmChoice(Protocol):
    """Picks the algorithm of a collective on `x`, or on so many bytes of a dtype, whose elements may be combined by
    `op`."""

    def all_reduce(self, x: torch.Tensor, op: str) -> AllReduceAlgorithm: ...

    def reduce(self, x: torch.Tensor, op: str, root: int) -> ReduceAlgorithm: ...

    def broadcast(self, x: torch.Tensor, root: int) -> BroadcastAlgorithm: ...

    def reduce_scatter(self, nbytes: int, dtype: torch.dtype, op: str) -> ReduceScatterAlgorithm: ...

    def all_gather(self, nbytes: int) -> AllGatherAlgorithm: ...


class LengthChoice:
    """For links that are all alike: short messages in one round, long ones in two.

    `latency_bytes` is the bandwidth-delay product of a link, in bytes.
    """

    def __init__(self, size: int, latency_bytes: float = LATENCY_BYTES) -> None:
        self._limit = one_shot_limit(size, latency_bytes)

    def all_reduce(self, x: torch.Tensor, op: str) -> AllReduceAlgorithm:
        return one_shot_all_reduce if x.nbytes <= self._limit else two_step_all_reduce

    def reduce(self, x: torch.Tensor, op: str, root: int) -> ReduceAlgorithm:
        return direct_reduce

    def broadcast(self, x: torch.Tensor, root: int) -> BroadcastAlgorithm:
        return direct_broadcast

    def reduce_scatter(self, nbytes: int, dtype: torch.dtype, op: str) -> ReduceScatterAlgorithm:
        return direct_reduce_scatter

    def all_gather(self, nbytes: int) -> AllGatherAlgorithm:
        return direct_all_gather


class MeasuredChoice:
    """The algorithm that costs least on a measured network.

    Sums have the bits of the balanced tree over ranks, whichever algorithm is taken. `any_order` gives that up: it also
    allows the ring, and the hierarchical all-reduce where machines are no subtrees. These have the same bits on all
    ranks, but other bits than the tree.
    """

    def __init__(self, network: NetworkModel, any_order: bool = False) -> None:
        n = network.size
        self.network = network
        self._reduce_scatters = CheapestAlgorithm[ReduceScatterAlgorithm](
            network, _scatter_algorithms(network, direct_reduce_scatter, HierarchicalReduceScatter)
        )
        self._all_gathers = CheapestAlgorithm[AllGatherAlgorithm](
            network, _scatter_algorithms(network, direct_all_gather, HierarchicalAllGather)
        )
        self._all_reduces = CheapestAlgorithm(network, _all_reduce_algorithms(network, any_order))
        self._reduces = CheapestAlgorithm[ReduceAlgorithm](
            network,
            [
                CostedAlgorithm(direct_reduce, lambda size, wide, root: rounds.direct_reduce_rounds(n, size, root)),
                CostedAlgorithm(tree_reduce, lambda size, wide, root: rounds.tree_reduce_rounds(range(n), wide, root)),
            ],
        )
        self._broadcasts = CheapestAlgorithm[BroadcastAlgorithm](
            network,
            [
                CostedAlgorithm(
                    direct_broadcast, lambda size, wide, root: rounds.direct_broadcast_rounds(n, size, root)
                ),
                CostedAlgorithm(
                    tree_broadcast, lambda size, wide, root: rounds.tree_broadcast_rounds(range(n), size, root)
                ),
                CostedAlgorithm(
                    scatter_all_gather_broadcast,
                    lambda size, wide, root: rounds.scatter_all_gather_rounds(n, size, root),
                ),
            ],
        )

    def all_reduce(self, x: torch.Tensor, op: str) -> AllReduceAlgorithm:
        return self._all_reduces.pick(x.nbytes, widens(x.dtype, op))

    def reduce(self, x: torch.Tensor, op: str, root: int) -> ReduceAlgorithm:
        return self._reduces.pick(x.nbytes, widens(x.dtype, op), root)

    def broadcast(self, x: torch.Tensor, root: int) -> BroadcastAlgorithm:
        return self._broadcasts.pick(x.nbytes, root=root)

    def reduce_scatter(self, nbytes: int, dtype: torch.dtype, op: str) -> ReduceScatterAlgorithm:
        return self._reduce_scatters.pick(nbytes, widens(dtype, op))

    def all_gather(self, nbytes: int) -> AllGatherAlgorithm:
        return self._all_gathers.pick(nbytes)


@dataclass(frozen=True)
class CostedAlgorithm(Generic[T]):
    """An algorithm, and rounds(bytes of the message, bytes of a partial result, root), the messages that it sends."""

    algorithm: T
    rounds: Callable[[float, float, int], rounds.Rounds]


class CheapestAlgorithm(Generic[T]):
    """Picks the algorithm of least seconds on a network, the first of those that cost the same, and remembers it."""

    def __init__(self, network: NetworkModel, algorithms: Sequence[CostedAlgorithm[T]]) -> None:
        self._network, self._algorithms = network, algorithms
        self._known: dict[tuple[int, bool, int], T] = {}

    def pick(self, nbytes: int, widen: bool = False, root: int = 0) -> T:
        """For a message of so many bytes; `widen`: its partial results have twice as many."""
        key = (_coarse(nbytes), widen, root)
        known = self._known.get(key)
        return known if known is not None else self._pick_and_remember(key)

    def _pick_and_remember(self, key: tuple[int, bool, int]) -> T:
        size, widen, root = key
        partial_size = 2 * size if widen else size
        best = min(self._algorithms, key=lambda costed: self._network.seconds(costed.rounds(size, partial_size, root)))
        self._known[key] = best.algorithm
        return best.algorithm


def _coarse(nbytes: int) -> int:
    """The number with all but its first four bits 0, so that lengths that are almost the same are chosen for once."""
    drop = max(nbytes.bit_length() - 4, 0)
    return nbytes >> drop << drop


def _all_reduce_algorithms(network: NetworkModel, any_order: bool) -> list[CostedAlgorithm[AllReduceAlgorithm]]:
    """Those that may be taken on a network of at least two ranks."""
    n, hosts = network.size, network.hosts
    algorithms: list[CostedAlgorithm[AllReduceAlgorithm]] = [
        CostedAlgorithm(one_shot_all_reduce, lambda size, wide, root: rounds.one_shot_rounds(n, size)),
        CostedAlgorithm(two_step_all_reduce, lambda size, wide, root: rounds.two_step_rounds(n, size)),
        CostedAlgorithm(tree_all_reduce, lambda size, wide, root: rounds.tree_rounds(n, size, wide)),
    ]
    if n > 2:
        shares = balanced_shares([network.port(rank) / hosts.count(hosts[rank]) for rank in range(n)])
        algorithms.append(
            CostedAlgorithm(
                WeightedAllReduce(shares, CHUNKS), lambda size, wide, root: rounds.weighted_rounds(shares, CHUNKS, size)
            )
        )
    if any_order:
        algorithms.append(CostedAlgorithm(ring_all_reduce, lambda size, wide, root: rounds.ring_rounds(n, size, wide)))
    if len(set(hosts)) < n and (any_order or hosts_are_subtrees(hosts)):
        algorithms += [
            _hierarchical(hosts, one_shot_all_reduce, rounds.one_shot_rounds),
            _hierarchical(hosts, two_step_all_reduce, rounds.two_step_rounds),
        ]
    return algorithms


def _hierarchical(
    hosts: Sequence[int], between: AllReduceAlgorithm, between_rounds: Callable[[int, float], rounds.Rounds]
) -> CostedAlgorithm[AllReduceAlgorithm]:
    return CostedAlgorithm(
        HierarchicalAllReduce(hosts, between),
        lambda size, wide, root: rounds.hierarchical_rounds(hosts, size, wide, between_rounds),
    )


def _scatter_algorithms(network: NetworkModel, direct: T, hierarchical: Callable[[int], T]) -> list[CostedAlgorithm[T]]:
    """Of reduce-scatter or all-gather; `hierarchical` makes that for machines of so many ranks each."""
    n, m = network.size, _ranks_per_host(network.hosts)
    algorithms = [CostedAlgorithm(direct, lambda size, wide, root: rounds.direct_scatter_rounds(n, size))]
    if m > 1:
        way = hierarchical(m)
        algorithms.append(CostedAlgorithm(way, lambda size, wide, root: rounds.hierarchical_scatter_rounds(n, m, wide)))
    return algorithms


def _ranks_per_host(hosts: Sequence[int]) -> int:
    """The ranks of each machine, where several machines have as many and are subtrees of the ranks; else 1."""
    here = hosts.count(hosts[0])
    even = all(hosts.count(host) == here for host in hosts)
    return here if even and here < len(hosts) and hosts_are_subtrees(hosts) else 1
