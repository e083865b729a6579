"""How far nodes are from each other, for whoever can choose from whom to take bytes.

`ChunkRegistry`: which node has which chunk of the weights, and so from whom another takes it. Clock handed in, no I/O.

A chunk is brought by one node at a time from where the files lie; all others wait for that node and take it from
there. So each byte crosses the links of those with the files once, however many nodes want it. Of several that have a
chunk one of the nearest gives it, and nodes of one machine wait for each other: what came to it crosses no link again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tllm.cluster.certificates import COORDINATOR
from tllm.cluster.messages import Why
from tllm.planner.measured.survey import Survey

Far = Callable[[str, str], float]
"""far(node, source): seconds in which some bytes come from the source; infinite where that is not known"""

SOME_BYTES = 1 << 20


def nowhere_near(node: str, source: str) -> float:
    """Where nothing is known, all are alike."""
    return math.inf


def far_by(machines: Mapping[str, str], survey: Survey | None) -> Far:
    """Nothing within a machine, of which `machines` has the name for each node; between two what was measured.

    A node that the survey does not have is as far as the nearest of its machine that it has.
    """
    ways: dict[tuple[str, str], float] = {}
    places = [machines.get(node.node, node.host_name) for node in survey.nodes] if survey is not None else []
    for way in survey.paths if survey is not None else ():
        pair, seconds = (places[way.target], places[way.source]), way.latency + SOME_BYTES / way.bandwidth
        ways[pair] = min(seconds, ways.get(pair, math.inf))

    def far(node: str, source: str) -> float:
        here, there = machines.get(node), machines.get(source)
        if here is None or there is None:
            return math.inf
        return 0.0 if here == there else ways.get((here, there), math.inf)

    return far


PATIENCE_SECONDS = 100.0
"""How long others wait for a node that brings a chunk. Its own deadlines are shorter: it is heard of before."""

ALIKE = 1.5
"""Who is up to so many times as far as the nearest is as near: such nodes share the giving."""


@dataclass
class ChunkRegistry:
    """Nodes by name; the coordinator has the files too, under its own. Chunks are known by their SHA-256.

    `brought[node, source]`: bytes that a node took from another, ever. `liars`: gave bytes of another hash. `far` says
    how far one is from another.
    """

    brought: Counter[tuple[str, str]] = field(default_factory=Counter)
    liars: set[str] = field(default_factory=set)
    far: Far = nowhere_near
    _kept: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _roots: set[str] = field(default_factory=lambda: {COORDINATOR})
    _bringing: defaultdict[bytes, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    _failed: set[tuple[str, str]] = field(default_factory=set)
    _given: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """A new epoch: nobody brings anything any more, and whoever failed may be tried again."""
        self._bringing.clear()
        self._failed.clear()

    def holds(self, node: str, digests: Iterable[bytes], files: bool = False) -> None:
        """A node says what it has."""
        for digest in digests:
            self._ended(node, digest)
            self._kept[node].add(digest)
        if files:
            self._roots.add(node)

    def forget(self, node: str) -> None:
        """A node is gone."""
        self._kept.pop(node, None)
        self._roots.discard(node)
        for bringers in self._bringing.values():
            bringers.pop(node, None)
        self._failed = {pair for pair in self._failed if node not in pair}

    def came(self, node: str, digest: bytes, nbytes: int, source: str, is_kept: bool) -> None:
        """A chunk came to a node whole."""
        self.brought[node, source] += nbytes
        self._ended(node, digest)
        if is_kept:
            self._kept[node].add(digest)

    def failed(self, node: str, digest: bytes, source: str, why: Why) -> None:
        """A node did not get a chunk where it was sent. One that only has gone from a shelf speaks for no other."""
        self._ended(node, digest)
        was_kept = digest in self._kept[source]
        self._kept[source].discard(digest)
        if why != "lacks" or not was_kept:
            self._failed.add((node, source))
        if why == "lied":
            self.liars.add(source)

    def source(self, node: str, digest: bytes, now: float) -> str | None:
        """From whom a node takes a chunk, itself perhaps; None: it waits for another that brings it.

        "" if there is nobody that it has not tried in vain.
        """
        if digest in self._kept[node]:
            return node
        keepers = [other for other, kept in self._kept.items() if digest in kept and self._may(node, other)]
        roots = [root for root in self._roots if root != node and self._may(node, root)]
        if any(self._is_beside(node, keeper) for keeper in keepers):
            return self._nearest(node, keepers)
        bringers = {other for other, since in self._bringing[digest].items() if now - since < PATIENCE_SECONDS} - {node}
        if any(self._is_beside(node, other) for other in bringers) if keepers else bringers:
            return None
        if not keepers and not roots:
            return ""
        self._bringing[digest][node] = now
        return self._nearest(node, keepers or roots)

    def _is_beside(self, node: str, other: str) -> bool:
        return self.far(node, other) == 0

    def _may(self, node: str, source: str) -> bool:
        return source not in self.liars and (node, source) not in self._failed

    def _nearest(self, node: str, sources: Collection[str]) -> str:
        """Of the nearest who has given the least so far; by name where that is equal."""
        away = {source: self.far(node, source) for source in sources}
        limit = ALIKE * min(away.values())
        chosen = min(
            (source for source in sources if away[source] <= limit), key=lambda source: (self._given[source], source)
        )
        self._given[chosen] += 1
        return chosen

    def _ended(self, node: str, digest: bytes) -> None:
        self._bringing[digest].pop(node, None)
