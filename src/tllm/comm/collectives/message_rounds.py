"""The messages of each algorithm, round by round: how many bytes go from which rank to which. A part of the cost model.

Nothing is sent here. `NetworkModel.seconds` turns rounds into seconds, and `algorithm_choice.py` compares these. Each
function has the name of the algorithm whose messages it lists. `size` is the message in bytes; `partial_size` the bytes
of a partial result of it, which are twice as many for sums of 16-bit floats (they travel as float32) and else the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from tllm.comm.collectives.all_reduce import leader_ranks, ranks_on_host
from tllm.comm.collectives.fold import left_subtree_size
from tllm.comm.collectives.network_model import Traffic
from tllm.comm.collectives.reduce_and_broadcast import tree_pair

Rounds = list[Traffic]


def one_shot_rounds(ranks: int, size: float) -> Rounds:
    """One round, all to all."""
    return [_all_to_all(ranks, size)]


def two_step_rounds(ranks: int, size: float) -> Rounds:
    """Two rounds, all to all, of one piece each."""
    return [_all_to_all(ranks, size / ranks)] * 2


def weighted_rounds(shares: Sequence[float], chunks: int, size: float) -> Rounds:
    """First only parts of pieces, then parts and results together, at last only results: chunks + 1 rounds."""
    ranks, chunk = range(len(shares)), size / chunks

    def weighted_round(parts: bool, results: bool) -> Traffic:
        return {(a, b): chunk * (parts * shares[b] + results * shares[a]) for a in ranks for b in ranks if a != b}

    return [weighted_round(True, False), *[weighted_round(True, True)] * (chunks - 1), weighted_round(False, True)]


def ring_rounds(ranks: int, size: float, partial_size: float) -> Rounds:
    """n - 1 rounds of partial results and n - 1 of results, each with one piece to the next rank."""
    return [
        {(a, (a + 1) % ranks): total / ranks for a in range(ranks)}
        for total in [partial_size, size]
        for _ in range(1, ranks)
    ]


def tree_reduce_rounds(ranks: Sequence[int], partial_size: float, root: int = 0) -> Rounds:
    """To `root`, an index in `ranks`: one round for each level of the tree, from the leaves up."""
    levels: defaultdict[int, dict[tuple[int, int], float]] = defaultdict(dict)

    def add_subtree(start: int, stop: int) -> None:
        if stop - start > 1:
            middle = start + left_subtree_size(stop - start)
            receiver, sender = tree_pair(root, start, middle, stop)
            levels[(stop - start - 1).bit_length()][ranks[sender], ranks[receiver]] = partial_size
            add_subtree(start, middle)
            add_subtree(middle, stop)

    add_subtree(0, len(ranks))
    return [levels[level] for level in sorted(levels)]


def tree_broadcast_rounds(ranks: Sequence[int], size: float, root: int = 0) -> Rounds:
    """From `root`: the rounds of the reduction in reverse order and direction."""
    return [{(b, a): size for a, b in traffic} for traffic in reversed(tree_reduce_rounds(ranks, size, root))]


def tree_rounds(ranks: int, size: float, partial_size: float) -> Rounds:
    """Of `tree_all_reduce`."""
    return tree_reduce_rounds(range(ranks), partial_size) + tree_broadcast_rounds(range(ranks), size)


def hierarchical_rounds(
    hosts: Sequence[int], size: float, partial_size: float, between: Callable[[int, float], Rounds]
) -> Rounds:
    """Of `HierarchicalAllReduce`; `between(leaders, bytes)` are the rounds of the algorithm between machines."""
    leaders = leader_ranks(hosts)
    machines = [ranks_on_host(hosts, hosts[leader]) for leader in leaders]
    middle = between(len(leaders), partial_size) if len(leaders) > 1 else []
    return [
        *_side_by_side([tree_reduce_rounds(ranks, partial_size) for ranks in machines]),
        *({(leaders[a], leaders[b]): part for (a, b), part in traffic.items()} for traffic in middle),
        *_side_by_side([tree_broadcast_rounds(ranks, size) for ranks in machines]),
    ]


def direct_scatter_rounds(ranks: int, size: float) -> Rounds:
    """Of `direct_reduce_scatter` and `direct_all_gather`: one round, all to all, of one piece each."""
    return [_all_to_all(ranks, size / ranks)]


def hierarchical_scatter_rounds(ranks: int, per_host: int, size: float) -> Rounds:
    """Of `HierarchicalReduceScatter`, and in another order of `HierarchicalAllGather`."""
    pairs, piece = _all_to_all(ranks, size / ranks), size / ranks
    inside = {(a, b): piece for a, b in pairs if a // per_host == b // per_host}
    between = {(a, b): piece for a, b in pairs if a != b and a % per_host == b % per_host}
    return [*[inside] * (ranks // per_host), between]


def direct_reduce_rounds(ranks: int, size: float, root: int) -> Rounds:
    """One round, from everyone to the root."""
    return [{(rank, root): size for rank in range(ranks) if rank != root}]


def direct_broadcast_rounds(ranks: int, size: float, root: int) -> Rounds:
    """One round, from the root to everyone."""
    return [{(root, rank): size for rank in range(ranks) if rank != root}]


def scatter_all_gather_rounds(ranks: int, size: float, root: int) -> Rounds:
    """Of `scatter_all_gather_broadcast`: one piece from the root to each rank, which all others get from that rank."""
    passed_on = {pair: part for pair, part in _all_to_all(ranks, size / ranks).items() if pair[1] != root}
    return [*direct_broadcast_rounds(ranks, size / ranks, root), passed_on]


def _all_to_all(ranks: int, size: float) -> Traffic:
    return {(a, b): size for a in range(ranks) for b in range(ranks) if a != b}


def _side_by_side(groups: Sequence[Rounds]) -> Rounds:
    """The rounds of disjoint groups at the same time."""
    longest = max(map(len, groups))
    return [
        {pair: size for rounds in groups for pair, size in (rounds[i : i + 1] or [{}])[0].items()}
        for i in range(longest)
    ]
