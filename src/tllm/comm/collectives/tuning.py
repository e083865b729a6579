"""Measures the links of a group when it begins, and lets the group choose its algorithms by that.

`measure_network` takes a bounded time and gives a `NetworkModel`, the same on every rank; `tune_group` lets the group
use it. Of each pair of ranks the lower one probes and the higher one answers: first some round trips of a few bytes,
which give the latency, then longer and longer messages each way, which give the rate, until one takes four round trips
or the pair's time is over. A machine takes part in one pair at a time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from itertools import combinations, groupby

import torch

from tllm.comm.collectives.algorithm_choice import AlgorithmChoice, MeasuredChoice
from tllm.comm.collectives.group import Group
from tllm.comm.collectives.group_links import HOST
from tllm.comm.collectives.network_model import Matrix, NetworkModel
from tllm.core.errors import counted

PINGS = 8
FIRST_BYTES, LAST_BYTES = 64 * 1024, 16 * 1024 * 1024
PAIR_SECONDS = 0.02  # for a pair, or PAIR_TRIPS round trips if these take longer: a TCP connection starts slowly
PAIR_TRIPS = 24
TOTAL_SECONDS = 5.0  # for all pairs of one rank

SHORTEST, LONGEST = 1 << 10, 1 << 26  # bytes of the sums of which `tune_between_hosts` gives the algorithms
UNITS = ("B", "KiB", "MiB")


def max_over_ranks(group: Group, number: float) -> float:
    """The greatest of the ranks' numbers, the same on each."""
    numbers = torch.tensor([number], dtype=torch.float64)
    return float(group.all_reduce(numbers, "max"))


def tune_between_hosts(group: Group, hosts: Sequence[str]) -> str:
    """`tune_group` for a group that spans machines, and one line that says what was measured; "" where nothing was.

    `hosts` names each rank's machine. Inside one machine all links are alike and fast, as `LengthChoice` assumes, and
    nothing is measured. All ranks call this. Sums keep their bits.
    """
    if group.size == 1 or len(set(hosts)) == 1:
        return ""
    network = tune_group(group, hosts[group.rank])
    return f"{group.name}: {_links_text(network)}; sums: {_sums_text(group.choice)}"


def tune_group(group: Group, host: str, any_order: bool = False) -> NetworkModel:
    """Measure, and let the group choose by it from now on; `any_order` as in `MeasuredChoice`. All ranks call this."""
    network = measure_network(group, host)
    if group.size > 1:
        group.choice = MeasuredChoice(network, any_order)
    return network


def measure_network(group: Group, host: str, seconds: float = TOTAL_SECONDS) -> NetworkModel:
    """The group's network, the same on every rank; ranks that give the same `host` share a machine."""
    hosts = _host_numbers(host, group)
    rounds = pair_rounds(hosts)
    limit = min(PAIR_SECONDS, seconds / max(len(rounds), 1))
    latency_and_rate = torch.zeros(2, group.size, group.size, dtype=torch.float64)
    message_seconds = 0.0
    for pairs in rounds:
        group.barrier()
        for low, high in pairs:
            if group.rank == low:
                probe = _LinkProbe(group, high)
                latency_and_rate[0, low, high] = latency_and_rate[0, high, low] = probe.round_trip / 2
                latency_and_rate[1, low, high] = probe.rate(limit, back=False)
                latency_and_rate[1, high, low] = probe.rate(limit, back=True)
                message_seconds = max(message_seconds, probe.send_seconds)
                probe.end()
            elif group.rank == high:
                _answer_probe(group, low)
    group.all_reduce(latency_and_rate)  # each number is on one rank, and zero on the others
    latency, rate = (_matrix(numbers) for numbers in latency_and_rate)
    return NetworkModel(latency, rate, hosts, max_over_ranks(group, message_seconds))


def pair_rounds(hosts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds in which each machine takes part in one pair at most."""
    left, rounds = list(combinations(range(len(hosts)), 2)), list[list[tuple[int, int]]]()
    while left:
        busy, pairs, rest = set[int](), list[tuple[int, int]](), list[tuple[int, int]]()
        for a, b in left:
            if hosts[a] in busy or hosts[b] in busy:
                rest.append((a, b))
            else:
                busy |= {hosts[a], hosts[b]}
                pairs.append((a, b))
        rounds.append(pairs)
        left = rest
    return rounds


class _LinkProbe:
    """The lower rank's side. Each request says how many bytes follow it, and how many are wanted back.

    `round_trip` is the least seconds of a request and one byte back; `send_seconds` those of sending a request.
    """

    def __init__(self, group: Group, peer: int) -> None:
        self._group, self._peer = group, peer
        self.send_seconds = float("inf")
        self.round_trip = min(self._timed(0, 1) for _ in range(PINGS))

    def rate(self, limit: float, back: bool) -> float:
        """Bytes/s one way (`back`: to this rank), from the time beyond a round trip; takes about limit / 2 seconds."""
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
        """Seconds of a request, `there` bytes to the peer and `back` bytes from it."""
        payload, answer = (_payload(self._group, size) for size in (there, back))
        start = time.perf_counter()
        self._request(there, back)
        self.send_seconds = min(self.send_seconds, time.perf_counter() - start)
        if there:
            self._group.exchange({self._peer: payload}, {})
        self._group.exchange({}, {self._peer: answer})
        return time.perf_counter() - start


def _answer_probe(group: Group, peer: int) -> None:
    """The higher rank's side, until the lower one has all it wants to know."""
    while True:
        there, back = group.recv_from(peer, torch.empty(2, dtype=torch.int64)).tolist()
        if not back:
            return
        assert max(there, back) <= LAST_BYTES
        if there:
            group.exchange({}, {peer: _payload(group, there)})
        group.exchange({peer: _payload(group, back)}, {})


def _payload(group: Group, size: int) -> torch.Tensor:
    """So many bytes, where the group's own tensors are."""
    device = HOST if group.device_links is None else group.device_links.device
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _host_numbers(host: str, group: Group) -> tuple[int, ...]:
    """Every rank's machine, numbered in the order of their first ranks."""
    digest = torch.tensor(list(hashlib.sha256(host.encode()).digest()), dtype=torch.uint8)
    digests = [tuple(rank_digest.tolist()) for rank_digest in group.all_gather(digest, [(32,)] * group.size)]
    order = list(dict.fromkeys(digests))
    return tuple(order.index(rank_digest) for rank_digest in digests)


def _matrix(numbers: torch.Tensor) -> Matrix:
    return tuple(tuple(row) for row in numbers.tolist())


def _links_text(network: NetworkModel) -> str:
    """The greatest latency and the least rate between two machines."""
    pairs = [(a, b) for a in range(network.size) for b in range(network.size) if network.hosts[a] != network.hosts[b]]
    latency = max(network.latency[a][b] for a, b in pairs)
    rate = min(network.rate[a][b] for a, b in pairs)
    where = f"{counted(network.size, 'rank')} on {counted(len(set(network.hosts)), 'machine')}"
    return f"{where}, {latency * 1e3:.2f} ms, {rate / 1e6:.0f} MB/s"


def _sums_text(choice: AlgorithmChoice) -> str:
    """Which algorithm sums float32 numbers, by the length of the message."""
    assert isinstance(choice, MeasuredChoice)
    sizes = [1 << bit for bit in range(SHORTEST.bit_length() - 1, LONGEST.bit_length())]
    chosen = [(_short_name(choice.all_reduce(torch.empty(size // 4, device="meta"), "sum")), size) for size in sizes]
    ranges = [(name, max(size for _, size in run)) for name, run in groupby(chosen, key=lambda pair: pair[0])]
    return ", ".join([*(f"{name} up to {_size_text(size)}" for name, size in ranges[:-1]), ranges[-1][0]])


def _short_name(algorithm: object) -> str:
    """As users read it: "ring" for `ring_all_reduce`, "weighted" for `WeightedAllReduce`."""
    name = str(getattr(algorithm, "__name__", type(algorithm).__name__)).lower()
    return name.removesuffix("_all_reduce").removesuffix("allreduce")


def _size_text(size: int) -> str:
    power = (size.bit_length() - 1) // 10
    return f"{size >> 10 * power} {UNITS[power]}"
