"""What ranks must have alike before they go on together.

What a group's links can do, found out in a bounded time: `measure` gives a `NetworkModel`, `tune` lets the group use
it.

Of each pair of ranks the lower one asks and the higher one answers: some round trips of a few bytes, then longer and
longer messages each way, until one takes three round trips or the pair's time is over. Each machine takes part in one
pair at a time.

A group that spans machines is tuned when it begins, and what came of it is said in one line for people.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from itertools import combinations, groupby

import torch

from tllm.comm.collectives.algorithm_choice import AlgorithmChoice, MeasuredChoice
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.network_model import Matrix, NetworkModel


def most(group: Group, number: float) -> float:
    """The greatest of the ranks' numbers, the same on each."""
    found = torch.tensor([number], dtype=torch.float64)
    return float(group.all_reduce(found, "max"))


PINGS = 8
FIRST_BYTES, LAST_BYTES = 64 * 1024, 16 * 1024 * 1024
PAIR_SECONDS = 0.02  # for a pair, or PAIR_TRIPS round trips if these take longer: a connection starts slowly
PAIR_TRIPS = 24
TOTAL_SECONDS = 5.0  # for all pairs of one rank


def tune(group: Group, host: str, any_order: bool = False) -> NetworkModel:
    """Measure, and let the group choose by it from now on; `any_order` as in `choose.Measured`. All ranks call it."""
    network = measure(group, host)
    if group.size > 1:
        group.choice = MeasuredChoice(network, any_order)
    return network


def measure(group: Group, host: str, seconds: float = TOTAL_SECONDS) -> NetworkModel:
    """The group's network, the same on every rank; ranks that give the same `host` share a machine."""
    hosts = _numbered(host, group)
    turns = turns_of(hosts)
    limit = min(PAIR_SECONDS, seconds / max(len(turns), 1))
    found = torch.zeros(2, group.size, group.size, dtype=torch.float64)
    work = 0.0
    for turn in turns:
        group.barrier()
        for low, high in turn:
            if group.rank == low:
                asking = _Asking(group, high)
                found[0, low, high] = found[0, high, low] = asking.round_trip / 2
                found[1, low, high] = asking.rate(limit, back=False)
                found[1, high, low] = asking.rate(limit, back=True)
                work = max(work, asking.sending)
                asking.end()
            elif group.rank == high:
                _answer(group, low)
    group.all_reduce(found)  # each number stands on one rank, beside zeros
    latency, rate = (_matrix(one) for one in found)
    return NetworkModel(latency, rate, hosts, most(group, work))


def turns_of(hosts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in turns in which each machine has one pair at most."""
    left, turns = list(combinations(range(len(hosts)), 2)), list[list[tuple[int, int]]]()
    while left:
        busy, turn = set[int](), list[tuple[int, int]]()
        for pair in left:
            machines = {hosts[rank] for rank in pair}
            if not machines & busy:
                busy |= machines
                turn.append(pair)
        left = [pair for pair in left if pair not in turn]
        turns.append(turn)
    return turns


class _Asking:
    """The lower rank's side: a request says how many bytes follow it, and how many are wanted back."""

    def __init__(self, group: Group, peer: int) -> None:
        self._group, self._peer = group, peer
        self.sending = float("inf")
        self.round_trip = min(self._timed(0, 1) for _ in range(PINGS))

    def rate(self, limit: float, back: bool) -> float:
        """Bytes/s one way, beyond what a round trip takes anyway."""
        until = time.perf_counter() + max(limit / 2, PAIR_TRIPS / 2 * self.round_trip)
        size, best = FIRST_BYTES, 0.0
        while True:
            took = self._timed(0 if back else size, size if back else 1)
            best = max(best, size / max(took - self.round_trip, took / 100))
            if size == LAST_BYTES or time.perf_counter() > until:
                return best
            if took < 4 * self.round_trip:
                size *= 2

    def end(self) -> None:
        self._request(0, 0)

    def _request(self, there: int, back: int) -> None:
        self._group.send_to(self._peer, torch.tensor([there, back]))

    def _timed(self, there: int, back: int) -> float:
        payload, answer = (torch.zeros(size, dtype=torch.uint8) for size in (there, back))
        start = time.perf_counter()
        self._request(there, back)
        self.sending = min(self.sending, time.perf_counter() - start)
        if there:
            self._group.exchange({self._peer: payload}, {})
        self._group.recv_from(self._peer, answer)
        return time.perf_counter() - start


def _answer(group: Group, peer: int) -> None:
    """The higher rank's side, until the lower one has asked for all it wants to know."""
    while True:
        there, back = group.recv_from(peer, torch.empty(2, dtype=torch.int64)).tolist()
        if not back:
            return
        assert max(there, back) <= LAST_BYTES
        if there:
            group.recv_from(peer, torch.empty(there, dtype=torch.uint8))
        group.exchange({peer: torch.zeros(back, dtype=torch.uint8)}, {})


def _numbered(host: str, group: Group) -> tuple[int, ...]:
    """Every rank's machine, numbered in the order of their first ranks."""
    digest = torch.tensor(list(hashlib.sha256(host.encode()).digest()), dtype=torch.uint8)
    names = [tuple(one.tolist()) for one in group.all_gather(digest, [(32,)] * group.size)]
    order = list(dict.fromkeys(names))
    return tuple(order.index(name) for name in names)


def _matrix(numbers: torch.Tensor) -> Matrix:
    return tuple(tuple(row) for row in numbers.tolist())


SHORTEST, LONGEST = 1 << 10, 1 << 26  # bytes of the sums that the line speaks of
UNITS = ("B", "KiB", "MiB")


def tune_between(group: Group, hosts: Sequence[str]) -> str:
    """Measure and choose by it; the line, "" where nothing was measured. `hosts` names each rank's machine.

    Inside one machine all links are alike and fast, which is what a group takes them for unmeasured. All ranks call it;
    sums keep their bits.
    """
    if group.size == 1 or len(set(hosts)) == 1:
        return ""
    network = tune(group, hosts[group.rank])
    return f"{group.name}: {_links(network)}; sums: {_sums(group.choice)}"


def _links(network: NetworkModel) -> str:
    """The worst way between two machines, as whoever waits for it meets it."""
    pairs = [(a, b) for a in range(network.size) for b in range(network.size) if network.hosts[a] != network.hosts[b]]
    latency = max(network.latency[a][b] for a, b in pairs)
    rate = min(network.rate[a][b] for a, b in pairs)
    return f"{network.size} ranks on {len(set(network.hosts))} machines, {latency * 1e3:.2f} ms, {rate / 1e6:.0f} MB/s"


def _sums(choice: AlgorithmChoice) -> str:
    """Which way float32 sums go, by their length."""
    assert isinstance(choice, MeasuredChoice)
    sizes = [1 << bit for bit in range(SHORTEST.bit_length() - 1, LONGEST.bit_length())]
    ways = [(_name(choice.all_reduce(torch.empty(size // 4, device="meta"), "sum")), size) for size in sizes]
    runs = [(name, max(size for _, size in run)) for name, run in groupby(ways, key=lambda way: way[0])]
    return ", ".join([*(f"{name} up to {_spell(size)}" for name, size in runs[:-1]), runs[-1][0]])


def _name(algorithm: object) -> str:
    return getattr(algorithm, "__name__", type(algorithm).__name__.lower())


def _spell(size: int) -> str:
    power = (size.bit_length() - 1) // 10
    return f"{size >> 10 * power} {UNITS[power]}"
