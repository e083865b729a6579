"""Which bytes each algorithm sends between whom, round by round: what `Network.seconds` adds up.

S is the message, `wide` the bytes of a partial result of it: for sums of 16-bit floats 2 S, else S.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tllm.comm.collectives.all_reduce import leaders_of, members, pair
from tllm.comm.collectives.fold import full
from tllm.comm.collectives.network_model import Traffic

Rounds = list[Traffic]


def one_shot(ranks: int, size: float) -> Rounds:
    return [_everyone(ranks, size)]


def two_step(ranks: int, size: float) -> Rounds:
    return [_everyone(ranks, size / ranks)] * 2


def weighted(shares: Sequence[float], chunks: int, size: float) -> Rounds:
    """First only parts, then parts and sums, at last only sums."""
    ranks, chunk = range(len(shares)), size / chunks

    def turn(parts: bool, sums: bool) -> Traffic:
        return {(a, b): chunk * (parts * shares[b] + sums * shares[a]) for a in ranks for b in ranks if a != b}

    return [turn(True, False), *[turn(True, True)] * (chunks - 1), turn(False, True)]


def ring(ranks: int, size: float, wide: float) -> Rounds:
    return [
        {(a, (a + 1) % ranks): total / ranks for a in range(ranks)} for total in [wide, size] for _ in range(1, ranks)
    ]


def up(ranks: Sequence[int], wide: float, root: int = 0) -> Rounds:
    """To `root`, an index in `ranks`, along the tree."""
    levels: defaultdict[int, dict[tuple[int, int], float]] = defaultdict(dict)

    def meet(start: int, stop: int) -> None:
        if stop - start > 1:
            middle = start + full(stop - start)
            top, other = pair(root, start, middle, stop)
            levels[(stop - start - 1).bit_length()][ranks[other], ranks[top]] = wide
            meet(start, middle)
            meet(middle, stop)

    meet(0, len(ranks))
    return [levels[level] for level in sorted(levels)]


def down(ranks: Sequence[int], size: float, root: int = 0) -> Rounds:
    """From `root`, the same way back."""
    return [{(b, a): size for a, b in traffic} for traffic in reversed(up(ranks, size, root))]


def tree(ranks: int, size: float, wide: float) -> Rounds:
    return up(range(ranks), wide) + down(range(ranks), size)


def hierarchical(hosts: Sequence[int], size: float, wide: float, between: str) -> Rounds:
    """`between` is the algorithm that the leaders sum by."""
    leaders = leaders_of(hosts)
    inside = [members(hosts, hosts[leader]) for leader in leaders]
    middle = {"one_shot": one_shot, "two_step": two_step}[between](len(leaders), wide) if len(leaders) > 1 else []
    return [
        *_together([up(ranks, wide) for ranks in inside]),
        *({(leaders[a], leaders[b]): part for (a, b), part in traffic.items()} for traffic in middle),
        *_together([down(ranks, size) for ranks in inside]),
    ]


def to_one(ranks: int, size: float, root: int) -> Rounds:
    """From everyone straight to one."""
    return [{(rank, root): size for rank in range(ranks) if rank != root}]


def from_one(ranks: int, size: float, root: int) -> Rounds:
    """From one straight to everyone."""
    return [{(root, rank): size for rank in range(ranks) if rank != root}]


def from_one_in_pieces(ranks: int, size: float, root: int) -> Rounds:
    """From one a piece to each, which these pass on to one another."""
    passed = {pair: part for pair, part in _everyone(ranks, size / ranks).items() if pair[1] != root}
    return [*from_one(ranks, size / ranks, root), passed]


def _everyone(ranks: int, size: float) -> Traffic:
    return {(a, b): size for a in range(ranks) for b in range(ranks) if a != b}


def _together(several: Sequence[Rounds]) -> Rounds:
    """Rounds of groups that do not touch one another, side by side."""
    longest = max(map(len, several))
    return [
        {wire: size for rounds in several for wire, size in (rounds[i : i + 1] or [{}])[0].items()}
        for i in range(longest)
    ]
