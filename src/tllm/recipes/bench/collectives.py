"""Benchmark of collectives: our groups over TLS, over TCP and in shared memory, and gloo, in turns in one run.

Rates are those of nccl-tests: algorithm bandwidth is bytes / seconds; bus bandwidth is that times the part of the bytes
that each rank's link must carry (`BUS`), so that it can be compared with the link's rate whatever the number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from tllm.comm.collectives.group import Group
from tllm.comm.collectives.tuning import tune_group
from tllm.comm.links.torch_link import interface_of
from tllm.parallel.collectives import sum_in_memory
from tllm.recipes.bench.echo import PLAIN, TLS, open_gloo
from tllm.recipes.bench.processes import CONTROL, DEADLINE, Seat

SIZES = (8 << 10, 64 << 10, 1 << 20, 16 << 20)
IN_MEMORY = "tllm memory"
"""Sums of ranks of one machine as a server makes them (`sum_in_memory`): an all-reduce alone, and of few bytes."""

WAYS = ("tllm TLS", "tllm plain", IN_MEMORY, "gloo")
PORTS = {"tllm TLS": TLS, "tllm plain": PLAIN, IN_MEMORY: 8}
"""Which of a rank's ports each of our ways has (a service of `Seat.group`)."""

LEAST, MOST = 3, 400

BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}
"""By collective, the part of the message that each of n ranks must send or receive."""

Call = Callable[[Tensor], object]


class CollectiveBench(msgspec.Struct):
    """What is to be measured; `tuned`: our groups first measure their links and choose algorithms by them."""

    kinds: tuple[str, ...] = tuple(BUS)
    ways: tuple[str, ...] = WAYS
    sizes: tuple[int, ...] = SIZES
    turns: int = 3
    seconds: float = 0.3
    tuned: bool = False


class Figures(msgspec.Struct):
    """One collective of one implementation at one size: 10th percentile and median seconds on rank 0, bytes sent.

    The bytes are the mean over ranks, for one call. `payload` is what our links count; `wire` what the network
    interface sent, with all headers (on loopback, with whatever else the machine sends itself). A broadcast comes from
    the last rank and a reduction ends on rank 0: their senders may run ahead, so their seconds are those of a stream of
    calls.
    """

    kind: str
    way: str
    size: int
    p10: float
    median: float
    count: int
    payload: float | None
    wire: float | None


class CollectiveTimes(msgspec.Struct):
    """The figures of a run; rates in bytes/s."""

    ranks: int
    figures: list[Figures]

    def algorithm_rate(self, figures: Figures) -> float:
        return figures.size / figures.median

    def bus_rate(self, figures: Figures) -> float:
        return self.algorithm_rate(figures) * BUS[figures.kind](self.ranks)


def measure_collectives(seat: Seat, asked: CollectiveBench) -> CollectiveTimes:
    """Measure; all ranks call this. The settings of rank 0 are used, and the figures are those of rank 0."""
    control = seat.group(encrypted=True, service=CONTROL, name="control")
    asked = msgspec.json.decode(control.broadcast_bytes(msgspec.json.encode(asked)), type=CollectiveBench)
    ways = [way for way in asked.ways if way != IN_MEMORY or len(set(seat.hosts)) == 1]
    ours = {way: seat.group(way != "tllm plain", PORTS[way]) for way in ways if way != "gloo"}
    if IN_MEMORY in ours:
        sum_in_memory(ours[IN_MEMORY], seat.hosts, is_able=True, seconds=DEADLINE)
    if asked.tuned:
        for group in (ours[way] for way in ours if way != IN_MEMORY):
            tune_group(group, host=seat.hosts[seat.rank])
    if "gloo" in ways:
        open_gloo(seat)
    times: dict[tuple[str, str, int], _Tally] = {}
    for _ in range(asked.turns):
        for kind in asked.kinds:
            for size in asked.sizes:
                x = torch.ones(size // 4 // seat.size * seat.size)
                for way in ways:
                    if way == IN_MEMORY and (kind != "all_reduce" or ours[way].memory_sums is None):
                        continue
                    call = _gloo(kind, seat) if way == "gloo" else _ours(kind, ours[way])
                    tally = times.setdefault((kind, way, x.nbytes), _Tally(seat, ours.get(way)))
                    tally.turn(call, x, control, asked.seconds)
    if "gloo" in ways:
        dist.destroy_process_group()
    control.barrier()
    for group in [*ours.values(), control]:
        group.close()
    return CollectiveTimes(seat.size, [tally.figures(*key) for key, tally in times.items()] if seat.rank == 0 else [])


class _Tally:
    """Seconds and bytes of one collective, implementation and size."""

    def __init__(self, seat: Seat, group: Group | None) -> None:
        self._group = group
        interface = Path("/sys/class/net", interface_of(seat.hosts[seat.rank]), "statistics/tx_bytes")
        self._counter = interface if interface.exists() else None
        self._sharing = seat.size if len(set(seat.hosts)) == 1 else 1  # ranks whose bytes one interface counts
        self.seconds, self.calls = list[float](), 0
        self.payload = self.wire = 0.0

    def turn(self, call: Call, x: Tensor, control: Group, seconds: float) -> None:
        """Add as many calls as fit into `seconds`; rank 0 decides how many, after one call that is not counted."""
        control.barrier()
        first = _timed(call, x)
        count = torch.tensor([max(LEAST, min(MOST, int(seconds / first)))])
        control.broadcast(count)
        before = self._bytes()
        self.seconds += [_timed(call, x) for _ in range(int(count))]
        self.calls += int(count)
        control.barrier()
        payload, wire = control.all_reduce(self._bytes() - before, "mean").tolist()
        self.payload += payload
        self.wire += wire / self._sharing

    def figures(self, kind: str, way: str, size: int) -> Figures:
        tenth = statistics.quantiles(self.seconds, n=10, method="inclusive")[0]
        payload = None if self._group is None else self.payload / self.calls
        wire = None if self._counter is None else self.wire / self.calls
        return Figures(kind, way, size, tenth, statistics.median(self.seconds), self.calls, payload, wire)

    def _bytes(self) -> Tensor:
        """Bytes sent so far: payload of our links, and by the network interface."""
        payload = 0 if self._group is None else sum(link.bytes_moved for link in self._group.send.values())
        return torch.tensor([payload, int(self._counter.read_text()) if self._counter else 0], dtype=torch.float64)


def _timed(call: Call, x: Tensor) -> float:
    start = time.perf_counter()
    call(x)
    return time.perf_counter() - start


def _ours(kind: str, group: Group) -> Call:
    """One collective of our group on a float32 tensor, whose length the ranks divide."""
    n = group.size
    calls: dict[str, Call] = {
        "all_reduce": lambda x: group.all_reduce(x.fill_(1.0)),
        "reduce_scatter": lambda x: group.reduce_scatter(x, [len(x) // n] * n),
        "all_gather": lambda x: group.all_gather_into(x, x.view(n, -1)[group.rank]),
        "all_to_all": lambda x: group.all_to_all(x.chunk(n), torch.empty_like(x).chunk(n)),
        "broadcast": lambda x: group.broadcast(x, n - 1),
        "reduce": lambda x: group.reduce(x.fill_(1.0)),
    }
    return calls[kind]


def _gloo(kind: str, seat: Seat) -> Call:
    """The same collective of `torch.distributed` over gloo."""
    n = seat.size
    calls: dict[str, Call] = {
        "all_reduce": lambda x: dist.all_reduce(x.fill_(1.0)),
        "reduce_scatter": lambda x: dist.reduce_scatter_tensor(x.new_empty(len(x) // n), x),
        "all_gather": lambda x: dist.all_gather_into_tensor(torch.empty_like(x), x.view(n, -1)[seat.rank]),
        "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
        "broadcast": lambda x: dist.broadcast(x, n - 1),
        "reduce": lambda x: dist.reduce(x.fill_(1.0), 0),
    }
    return calls[kind]
