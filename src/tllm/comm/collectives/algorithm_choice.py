"""Which algorithm a group takes for a message: `LengthChoice` knows nothing of its links, `MeasuredChoice` what they
cost.

All ranks must choose alike: by the length of the message, which all know, and numbers that all have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from tllm.comm.collectives import message_rounds as rounds
from tllm.comm.collectives.all_reduce import (
    LATENCY_BYTES,
    Algorithm,
    Ends,
    Hierarchical,
    Weighted,
    fold_direct,
    fold_up,
    nests,
    one_shot,
    one_shot_limit,
    ring,
    shares_of,
    spread_direct,
    spread_down,
    spread_in_pieces,
    tree,
    two_step,
)
from tllm.comm.collectives.fold import widens
from tllm.comm.collectives.network_model import NetworkModel

Fold = Callable[[torch.Tensor, Ends, str, int], None]
Spread = Callable[[torch.Tensor, Ends, int], None]
T = TypeVar("T")

CHUNKS = 8  # of a weighted sum: its first and last go one way only, which costs a ninth


class AlgorithmChoice(Protocol):
    """Picks how to carry out a collective on `x`."""

    def all_reduce(self, x: torch.Tensor, op: str) -> Algorithm: ...

    def reduce(self, x: torch.Tensor, op: str, root: int) -> Fold: ...

    def broadcast(self, x: torch.Tensor, root: int) -> Spread: ...


class LengthChoice:
    """Short messages in one hop, long ones in two, as for links that are all alike with `latency_bytes` under way."""

    def __init__(self, size: int, latency_bytes: float = LATENCY_BYTES) -> None:
        self._limit = one_shot_limit(size, latency_bytes)

    def all_reduce(self, x: torch.Tensor, op: str) -> Algorithm:
        return one_shot if x.nbytes <= self._limit else two_step

    def reduce(self, x: torch.Tensor, op: str, root: int) -> Fold:
        return fold_direct

    def broadcast(self, x: torch.Tensor, root: int) -> Spread:
        return spread_direct


class FixedChoice(LengthChoice):
    """One algorithm for every sum over all ranks."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def all_reduce(self, x: torch.Tensor, op: str) -> Algorithm:
        return self.algorithm


class MeasuredChoice:
    """The one that costs least on a network. Sums have the bits of the balanced tree over ranks, unless in `any_order`.

    That also allows `ring`, and `Hierarchical` where machines are no subtrees: the same bits on all ranks, but others.
    """

    def __init__(self, network: NetworkModel, any_order: bool = False) -> None:
        n = network.size
        self.network = network
        self._sums = Cheapest(network, _sums(network, any_order))
        self._folds = Cheapest[Fold](
            network,
            [
                CostedAlgorithm(fold_direct, lambda size, wide, root: rounds.to_one(n, size, root)),
                CostedAlgorithm(fold_up, lambda size, wide, root: rounds.up(range(n), wide, root)),
            ],
        )
        self._spreads = Cheapest[Spread](
            network,
            [
                CostedAlgorithm(spread_direct, lambda size, wide, root: rounds.from_one(n, size, root)),
                CostedAlgorithm(spread_down, lambda size, wide, root: rounds.down(range(n), size, root)),
                CostedAlgorithm(spread_in_pieces, lambda size, wide, root: rounds.from_one_in_pieces(n, size, root)),
            ],
        )

    def all_reduce(self, x: torch.Tensor, op: str) -> Algorithm:
        return self._sums.of(x, op)

    def reduce(self, x: torch.Tensor, op: str, root: int) -> Fold:
        return self._folds.of(x, op, root)

    def broadcast(self, x: torch.Tensor, root: int) -> Spread:
        return self._spreads.of(x, root=root)


@dataclass(frozen=True)
class CostedAlgorithm(Generic[T]):
    """An algorithm, and its rounds for a message of some bytes, those of a partial result, and a root."""

    algorithm: T
    rounds: Callable[[float, float, int], rounds.Rounds]


class Cheapest(Generic[T]):
    """Picks of several ways the one of least seconds; the first of those that cost the same."""

    def __init__(self, network: NetworkModel, ways: Sequence[CostedAlgorithm[T]]) -> None:
        self._network, self._ways = network, ways
        self._known: dict[tuple[int, bool, int], T] = {}

    def of(self, x: torch.Tensor, op: str = "max", root: int = 0) -> T:
        key = (_coarse(x.nbytes), widens(x.dtype, op), root)
        found = self._known.get(key)
        return found if found is not None else self._keep(key)

    def _keep(self, key: tuple[int, bool, int]) -> T:
        size, widen, root = key
        wide = 2 * size if widen else size
        best = min(self._ways, key=lambda way: self._network.seconds(way.rounds(size, wide, root)))
        self._known[key] = best.algorithm
        return best.algorithm


def _coarse(nbytes: int) -> int:
    """The number with all bits but its first four 0: what differs less is chosen for alike, and once."""
    drop = max(nbytes.bit_length() - 4, 0)
    return nbytes >> drop << drop


def _sums(network: NetworkModel, any_order: bool) -> list[CostedAlgorithm[Algorithm]]:
    """The ways to sum over all ranks of a network of at least two."""
    n, hosts = network.size, network.hosts
    ways: list[CostedAlgorithm[Algorithm]] = [
        CostedAlgorithm(one_shot, lambda size, wide, root: rounds.one_shot(n, size)),
        CostedAlgorithm(two_step, lambda size, wide, root: rounds.two_step(n, size)),
        CostedAlgorithm(tree, lambda size, wide, root: rounds.tree(n, size, wide)),
    ]
    if n > 2:
        shares = shares_of([network.port(rank) / hosts.count(hosts[rank]) for rank in range(n)])
        ways.append(
            CostedAlgorithm(Weighted(shares, CHUNKS), lambda size, wide, root: rounds.weighted(shares, CHUNKS, size))
        )
    if any_order:
        ways.append(CostedAlgorithm(ring, lambda size, wide, root: rounds.ring(n, size, wide)))
    if len(set(hosts)) < n and (any_order or nests(hosts)):
        ways += [
            _hierarchical(hosts, between, name) for between, name in ((one_shot, "one_shot"), (two_step, "two_step"))
        ]
    return ways


def _hierarchical(hosts: Sequence[int], between: Algorithm, name: str) -> CostedAlgorithm[Algorithm]:
    return CostedAlgorithm(
        Hierarchical(hosts, between), lambda size, wide, root: rounds.hierarchical(hosts, size, wide, name)
    )
