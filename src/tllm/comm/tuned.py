"""A group that spans machines is tuned when it begins, and what came of it is said in one line for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from tllm.comm.choose import Choice, Measured
from tllm.comm.group import Group
from tllm.comm.measure import tune
from tllm.comm.network import Network

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


def _links(network: Network) -> str:
    """The worst way between two machines, as whoever waits for it meets it."""
    pairs = [(a, b) for a in range(network.size) for b in range(network.size) if network.hosts[a] != network.hosts[b]]
    latency = max(network.latency[a][b] for a, b in pairs)
    rate = min(network.rate[a][b] for a, b in pairs)
    return f"{network.size} ranks on {len(set(network.hosts))} machines, {latency * 1e3:.2f} ms, {rate / 1e6:.0f} MB/s"


def _sums(choice: Choice) -> str:
    """Which way float32 sums go, by their length."""
    assert isinstance(choice, Measured)
    sizes = [1 << bit for bit in range(SHORTEST.bit_length() - 1, LONGEST.bit_length())]
    ways = [(_name(choice.all_reduce(torch.empty(size // 4, device="meta"), "sum")), size) for size in sizes]
    runs = [(name, max(size for _, size in run)) for name, run in groupby(ways, key=lambda way: way[0])]
    return ", ".join([*(f"{name} up to {_spell(size)}" for name, size in runs[:-1]), runs[-1][0]])


def _name(algorithm: object) -> str:
    return getattr(algorithm, "__name__", type(algorithm).__name__.lower())


def _spell(size: int) -> str:
    power = (size.bit_length() - 1) // 10
    return f"{size >> 10 * power} {UNITS[power]}"
