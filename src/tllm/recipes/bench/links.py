"""Benchmark of links: round trips of a tensor between two processes, by our links and by other libraries, in turns."""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from tllm.comm.collectives.group import Group
from tllm.recipes.bench.echo import WAYS, Echo, is_installed
from tllm.recipes.bench.processes import CONTROL, Seat

SIZES = (64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20)
ENCRYPTED = ("tllm TLS", "tllm gRPC")
LEAST, MOST = 3, 200  # round trips of one turn


def between_machines(trusted: bool) -> tuple[str, ...]:
    """What can be measured between two machines: without encryption only where the network is trusted."""
    return tuple(way for way in WAYS if way != "Ray" and (trusted or way in ENCRYPTED))


class LinkBench(msgspec.Struct):
    """What is to be measured. `seconds` is the length of one turn of one library at one size (bytes)."""

    ways: tuple[str, ...] = tuple(WAYS)
    sizes: tuple[int, ...] = SIZES
    turns: int = 3
    seconds: float = 0.5


class LinkTimes(msgspec.Struct):
    """Median seconds in one direction (half a round trip), by library and size, from `count` round trips.

    `missing` are the libraries that are not installed on both sides.
    """

    seconds: dict[str, dict[int, float]]
    count: dict[str, dict[int, int]]
    missing: list[str]
    turns: int

    def rate(self, way: str, size: int) -> float:
        """Bytes/s."""
        return size / self.seconds[way][size]


def measure_links(seat: Seat, asked: LinkBench) -> LinkTimes:
    """Measure; both ranks call this. The settings of rank 0 are used, and the times are those of rank 0."""
    control = seat.group(encrypted=True, service=CONTROL, name="control")
    asked = msgspec.json.decode(control.broadcast_bytes(msgspec.json.encode(asked)), type=LinkBench)
    ways, sizes, turns = asked.ways, asked.sizes, asked.turns
    both = control.all_reduce(torch.tensor([is_installed(way) for way in ways], dtype=torch.uint8), "min").tolist()
    found = [way for way, here in zip(ways, both, strict=True) if here]
    echoes = {way: WAYS[way][1](seat) for way in found}
    trips: dict[str, dict[int, list[float]]] = {way: {size: [] for size in sizes} for way in found}
    for _ in range(turns):
        for size in sizes:
            x = torch.arange(size, dtype=torch.int64).to(torch.uint8)
            for way, echo in echoes.items():
                trips[way][size] += _turn(echo, x, control, asked.seconds)
                assert size < 3 or int(x[2]) == 2, f"{way} brings back something else"
    control.barrier()  # the side that answers has no more to do while the other still asks
    for echo in echoes.values():
        echo.close()
    control.barrier()
    control.close()
    if seat.rank:
        return LinkTimes({}, {}, [], turns)
    return LinkTimes(
        {way: {size: statistics.median(of) / 2 for size, of in by.items()} for way, by in trips.items()},
        {way: {size: len(of) for size, of in by.items()} for way, by in trips.items()},
        [way for way in ways if way not in found],
        turns,
    )


def _turn(echo: Echo, x: torch.Tensor, control: Group, seconds: float) -> list[float]:
    """Seconds of each round trip of one turn, after one that is not counted; [] on the rank that answers."""
    control.barrier()
    count = torch.zeros(1, dtype=torch.int64)
    if control.rank == 0:
        first = _ask(echo, x)
        count.fill_(max(LEAST, min(MOST, int(seconds / first))))
        control.broadcast(count)
        return [_ask(echo, x) for _ in range(int(count))]
    echo.answer(x)
    for _ in range(int(control.broadcast(count))):
        echo.answer(x)
    return []


def _ask(echo: Echo, x: torch.Tensor) -> float:
    start = time.perf_counter()
    echo.ask(x)
    return time.perf_counter() - start
