"""`Seats`: which node takes which rank of the plan that was asked for, however often nodes go and come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Seats:
    """A node keeps its rank for as long as it is here, and gets it back if it is still free when it returns.

    So what is left of a plan stays in order, and each node keeps most of its weights.
    """

    def __init__(self, ranks: int, first: Sequence[str] = ()) -> None:
        self._ranks = ranks
        self._own = {node: rank for rank, node in enumerate(first)}

    def fill(self, living: Sequence[str], wishes: Mapping[str, int] | None = None) -> dict[int, str]:
        """The node of each rank that has one, by rank; `living` in the order in which they joined.

        `wishes` are ranks that nodes had under another coordinator, which they get if nobody has them.
        """
        taken = {rank: node for node in living if (rank := self._own.get(node)) is not None}
        for node in living:
            wish = (wishes or {}).get(node, self._ranks)
            if node not in taken.values() and wish < self._ranks:
                taken.setdefault(wish, node)
        for node in living:
            free = [rank for rank in range(self._ranks) if rank not in taken]
            if free and node not in taken.values():
                taken[free[0]] = node
        absent = {node: rank for node, rank in self._own.items() if rank not in taken}
        self._own = absent | {node: rank for rank, node in taken.items()}
        return dict(sorted(taken.items()))
