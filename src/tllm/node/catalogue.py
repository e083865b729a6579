"""`Catalogue`: which node has which chunk of the weights, and so from whom another takes it. Clock handed in, no I/O.

A chunk is brought by one node at a time from where the files lie; all others wait for that node and take it from
there. So each byte crosses the links of those with the files once, however many nodes want it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tllm.cluster.identity import COORDINATOR
from tllm.cluster.weight_messages import Why

PATIENCE_SECONDS = 100.0
"""How long others wait for a node that brings a chunk. Its own deadlines are shorter: it is heard of before."""


@dataclass
class Catalogue:
    """Nodes by name; the coordinator has the files too, under its own. Chunks are known by their SHA-256.

    `brought[node, source]`: bytes that a node took from another, ever. `liars`: gave bytes of another hash.
    """

    brought: Counter[tuple[str, str]] = field(default_factory=Counter)
    liars: set[str] = field(default_factory=set)
    _kept: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _roots: set[str] = field(default_factory=lambda: {COORDINATOR})
    _bringing: dict[bytes, tuple[str, float]] = field(default_factory=dict)
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
        self._bringing = {digest: one for digest, one in self._bringing.items() if one[0] != node}
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
        if keepers:
            return self._least(keepers)
        bringer, since = self._bringing.get(digest, (node, now))
        if bringer != node and now - since < PATIENCE_SECONDS:
            return None
        roots = [root for root in self._roots if root != node and self._may(node, root)]
        if not roots:
            return ""
        self._bringing[digest] = (node, now)
        return self._least(roots)

    def _may(self, node: str, source: str) -> bool:
        return source not in self.liars and (node, source) not in self._failed

    def _least(self, sources: Collection[str]) -> str:
        """Who has given the least so far; by name where that is equal."""
        chosen = min(sources, key=lambda source: (self._given[source], source))
        self._given[chosen] += 1
        return chosen

    def _ended(self, node: str, digest: bytes) -> None:
        if self._bringing.get(digest, ("", 0.0))[0] == node:
            del self._bringing[digest]
