"""`ChunkRegistry`: which node has which chunk of the weights, and so from whom another fetches it. Pure: the time is
an argument, and there is no I/O.

Only one node at a time fetches a chunk from those that have the model's files; all others wait for that node and fetch
the chunk from it. So each byte crosses the links of the file holders once, however many nodes want it. Of several nodes
that have a chunk one of the nearest gives it, and nodes of one machine wait for each other, so that no chunk crosses a
link to the same machine twice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tllm.cluster.certificates import COORDINATOR
from tllm.cluster.weight_messages import Why
from tllm.planner.measured.survey import Survey

PATIENCE_SECONDS = 100.0
"""How long others wait for a node that fetches a chunk. Its own deadlines are shorter, so that it reports a failure
before."""

ALIKE = 1.5
"""A source that is at most so many times as far as the nearest counts as near, so that such sources share the load."""

SOME_BYTES = 1 << 20

Far = Callable[[str, str], float]
"""far(node, source): the seconds that `SOME_BYTES` take from the source to the node; infinite where not known"""


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


@dataclass
class ChunkRegistry:
    """Nodes are known by name; the coordinator, which has the files, by its own. Chunks are known by their SHA-256.

    `brought[node, source]` counts the bytes that a node has fetched from another so far. `liars` are those that gave
    bytes of another hash. `far` says how far one node is from another.
    """

    brought: Counter[tuple[str, str]] = field(default_factory=Counter)
    liars: set[str] = field(default_factory=set)
    far: Far = nowhere_near
    _held: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _holders: defaultdict[bytes, set[str]] = field(default_factory=lambda: defaultdict(set))  # the same by the chunk
    _roots: set[str] = field(default_factory=lambda: {COORDINATOR})
    _fetching: defaultdict[bytes, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    _failed: set[tuple[str, str]] = field(default_factory=set)
    _given: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """A new epoch: no fetch is under way any more, and whoever failed may be tried again."""
        self._fetching.clear()
        self._failed.clear()

    def holds(self, node: str, digests: Iterable[bytes], files: bool = False) -> None:
        """A node reports chunks that it has, or all of the model's `files`."""
        for digest in digests:
            self._ended(node, digest)
            self._keep(node, digest)
        if files:
            self._roots.add(node)

    def has_files(self, node: str) -> bool:
        """Whether a node has all of the model's files."""
        return node in self._roots

    def is_held(self, digest: bytes) -> bool:
        """Whether some node is known to have a chunk."""
        return bool(self._holders.get(digest))

    def forget(self, node: str) -> None:
        """A node is gone."""
        for digest in self._held.pop(node, ()):
            self._holders[digest].discard(node)
        self._roots.discard(node)
        for fetchers in self._fetching.values():
            fetchers.pop(node, None)
        self._failed = {pair for pair in self._failed if node not in pair}

    def came(self, node: str, digest: bytes, nbytes: int, source: str, is_kept: bool) -> None:
        """A node has fetched a whole chunk from a source. If it `is_kept`, the node can pass it on."""
        self.brought[node, source] += nbytes
        self._ended(node, digest)
        if is_kept:
            self._keep(node, digest)

    def failed(self, node: str, digest: bytes, source: str, why: Why) -> None:
        """A node did not get a chunk from where it was sent.

        If the chunk has only gone from the source's cache, that says nothing about the source's other chunks.
        """
        self._ended(node, digest)
        was_held = digest in self._held[source]
        self._held[source].discard(digest)
        self._holders[digest].discard(source)
        if why != "lacks" or not was_held:
            self._failed.add((node, source))
        if why == "lied":
            self.liars.add(source)

    def source(self, node: str, digest: bytes, now: float) -> str | None:
        """From whom a node fetches a chunk, perhaps from its own cache; None: it waits for another that fetches it.

        "" if there is nobody left that it has not tried in vain.
        """
        if digest in self._held[node]:
            return node
        holders = [other for other in self._holders[digest] if self._may(node, other)]
        roots = [root for root in self._roots if root != node and self._may(node, root)]
        if any(self._is_beside(node, holder) for holder in holders):
            return self._nearest(node, holders)
        fetchers = {other for other, since in self._fetching[digest].items() if now - since < PATIENCE_SECONDS} - {node}
        if any(self._is_beside(node, other) for other in fetchers) if holders else fetchers:
            return None
        if not holders and not roots:
            return ""
        self._fetching[digest][node] = now
        return self._nearest(node, holders or roots)

    def _is_beside(self, node: str, other: str) -> bool:
        return self.far(node, other) == 0

    def _may(self, node: str, source: str) -> bool:
        return source not in self.liars and (node, source) not in self._failed

    def _nearest(self, node: str, sources: Collection[str]) -> str:
        """Of the nearest sources the one that was named least often so far; by name where that is equal."""
        away = {source: self.far(node, source) for source in sources}
        limit = ALIKE * min(away.values())
        chosen = min(
            (source for source in sources if away[source] <= limit), key=lambda source: (self._given[source], source)
        )
        self._given[chosen] += 1
        return chosen

    def _keep(self, node: str, digest: bytes) -> None:
        self._held[node].add(digest)
        self._holders[digest].add(node)

    def _ended(self, node: str, digest: bytes) -> None:
        self._fetching[digest].pop(node, None)
