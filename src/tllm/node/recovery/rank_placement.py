"""`RankPlacement`: which node takes which rank of a plan, however often nodes go and come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class RankPlacement:
    """A node keeps its rank for as long as it is here, and gets it back if it is still free when it returns.

    So the ranks that are left stay in their order, and each node keeps most of the weights that it has loaded.
    `first` names the nodes that begin with the first ranks.
    """

    def __init__(self, ranks: int, first: Sequence[str] = ()) -> None:
        self._ranks = ranks
        self._kept = {node: rank for rank, node in enumerate(first)}

    def fill(self, living: Sequence[str], wishes: Mapping[str, int] | None = None) -> dict[int, str]:
        """The node of each rank that has one, by rank; `living` names nodes in the order in which they joined.

        `wishes` are the ranks that nodes had under an earlier coordinator, which they get if nobody else has them.
        """
        taken = {rank: node for node in living if (rank := self._kept.get(node)) is not None}
        placed = set(taken.values())
        for node in living:
            wish = (wishes or {}).get(node, self._ranks)
            if node not in placed and wish < self._ranks and wish not in taken:
                taken[wish] = node
                placed.add(node)
        free = [rank for rank in range(self._ranks) if rank not in taken]
        late = (node for node in living if node not in placed)
        taken |= dict(zip(free, late, strict=False))
        absent = {node: rank for node, rank in self._kept.items() if rank not in taken}
        self._kept = absent | {node: rank for rank, node in taken.items()}
        return dict(sorted(taken.items()))
