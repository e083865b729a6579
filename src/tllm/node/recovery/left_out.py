"""`LeftOut`: nodes that are here but get no rank, because an epoch could not begin with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tllm.cluster.state import Member

AGAIN_SECONDS = 60.0
"""After so long a node may have a rank again; after twice as long each further time that it could not."""

MOST_SECONDS = 3600.0

Fault = frozenset[str]
"""One node that could not take its part, or two of which one could not with the other"""


@dataclass(frozen=True)
class Remembered:
    """Why an epoch could not begin, until when that counts, and for how many seconds it was to count."""

    why: str
    until: float
    seconds: float


class LeftOut:
    """What nodes could not take their parts for. Of two that cannot work together one is enough to be left out.

    `now` is a clock, and `seniority` names the nodes that are here, those first that are to be kept before others.
    `faults` is replaced and never changed, so that whoever has kept it can go back to it.
    """

    def __init__(self, now: Callable[[], float], seniority: Callable[[], Sequence[str]]) -> None:
        self.now, self._seniority = now, seniority
        self.faults: Mapping[Fault, Remembered] = {}

    def add(self, ranks: Sequence[Member]) -> None:
        """These are the ranks of an epoch that did not begin. What a node says of one that failed by itself, or is
        lost, is a consequence."""
        refused = [member for member in ranks if member.phase == "refused"]
        by_rank = {member.rank: member for member in ranks}  # one that has come anew since has no rank
        own = {member.node for member in refused if member.peer is None}
        own |= {member.node for member in ranks if not member.is_living}
        for member in refused:
            if member.peer is None:
                self.note((member.node,), member.reason)
            elif (peer := by_rank.get(member.peer)) is not None and not own & {member.node, peer.node}:
                self.note((member.node, peer.node), member.reason)

    def note(self, nodes: Iterable[str], why: str) -> None:
        """A node failed by itself, or two of them between each other."""
        fault, now = frozenset(nodes), self.now()
        before = self.faults.get(fault)
        if before is not None and before.until > now:
            return
        seconds = AGAIN_SECONDS if before is None else min(2 * before.seconds, MOST_SECONDS)
        self.faults = {**self.faults, fault: Remembered(why, now + seconds, seconds)}

    def forget(self, node: str) -> None:
        """The node is gone: one that comes by its name has had no fault yet."""
        self.faults = {fault: kept for fault, kept in self.faults.items() if node not in fault}

    def apart(self) -> set[str]:
        """Who is left out now and cannot work with another node, not even to lend it memory."""
        return {node for fault in self._present() if len(fault) == 2 for node in fault} & self.nodes().keys()

    def nodes(self) -> Mapping[str, str]:
        """Who is left out now, and why: the fewest without which no fault is left; of two the younger."""
        faults = self._present()
        if not faults:
            return {}
        age = {node: place for place, node in enumerate(self._seniority())}
        out = {node: why for fault, why in faults.items() if len(fault) == 1 for node in fault}
        while left := [fault for fault in faults if not fault & out.keys()]:
            counts: dict[str, int] = {}
            for node in (node for fault in left for node in fault):
                counts[node] = counts.get(node, 0) + 1
            worst = max(counts, key=lambda node: (counts[node], age.get(node, len(age))))
            out[worst] = next(why for fault, why in faults.items() if worst in fault)
        return out

    def _present(self) -> dict[Fault, str]:
        """The faults that count now, and why."""
        return {fault: kept.why for fault, kept in self.faults.items() if kept.until > self.now()}
