"""What is wrong between nodes: network paths that are closed, slow, far, unsteady or lossy, and clocks that differ.

The rules are pure functions, and what they find is worded for the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from tllm.node.machine.machine_facts import ClusterProbe, Diagnosis, NetworkPath, PathMeasurement

MEGABIT = 1e6 / 8  # bytes per second

FAST_ENOUGH = 500 * MEGABIT
"""What a wire of 1 Gbit/s reaches at least, with TLS and slow processors."""

PORT_100 = (60 * MEGABIT, 110 * MEGABIT)
"""Between these a 100 Mbit/s port or cable is the likely cause: 94 Mbit/s is what TCP makes of it, and two seconds of
measuring on a busy machine may find 101, by what lay in buffers before."""

UNEQUAL = 3.0
FAR, UNSTEADY = 5e-3, 2e-3  # seconds
LOSSY = 1e-3
CLOCKS_APART = 1.0  # seconds
ETHERNET_MTU = 1500


def of_clocks(probe: ClusterProbe) -> Iterator[Diagnosis]:
    """Nodes whose clock is not that of the first."""
    for path in probe.ways:
        if probe.nodes and path.source == probe.nodes[0].node and path.measured is not None:
            offset = path.measured.offset
            if abs(offset) > CLOCKS_APART:
                side = "ahead of" if offset > 0 else "behind"
                yield Diagnosis(
                    path.target,
                    f"its clock is {abs(offset):.1f} s {side} that of {path.source}",
                    "Let both follow a time server (timedatectl set-ntp true): logs do not line up, and beyond an hour "
                    "certificates are refused",
                )


def of_paths(probe: ClusterProbe) -> Iterator[Diagnosis]:
    """The network between the nodes."""
    apart = [path for path in probe.ways if not _on_one_machine(probe, path)]
    yield from _of_reach(probe)
    yield from _of_rates(probe, apart)
    yield from _of_directions(apart)
    for a, b in combinations([node.node for node in probe.nodes], 2):
        pair = [path.measured for path in apart if {path.source, path.target} == {a, b} and path.measured is not None]
        if pair:
            yield from _of_pair(f"{a} and {b}", pair)


def _of_reach(probe: ClusterProbe) -> Iterator[Diagnosis]:
    for node in probe.nodes:
        name = node.node
        towards = [path for path in probe.ways if path.target == name]
        if len(towards) > 1 and all(path.measured is None for path in towards):
            yield Diagnosis(
                name,
                f"no other node reaches it ({towards[0].fault})",
                towards[0].advice
                or "Let TCP in through its firewall, or `tllm join --listen` with the address that the others see",
            )
            continue
        for path in towards:
            if path.measured is None:
                yield Diagnosis(
                    f"{path.source} to {name}",
                    path.fault,
                    path.advice or "See the firewalls and routes between these two: every node must reach every other",
                )


def _of_rates(probe: ClusterProbe, apart: Sequence[NetworkPath]) -> Iterator[Diagnosis]:
    """Blame a node if all its paths are slow and others are not; else name each slow pair of nodes."""
    slow = [path for path in apart if path.measured is not None and path.measured.bandwidth < FAST_ENOUGH]
    blamed = set[str]()
    for node in probe.nodes:
        mine = [path for path in apart if node.node in (path.source, path.target) and path.measured is not None]
        partners = {name for path in mine for name in (path.source, path.target)} - {node.node}
        if len(partners) > 1 and all(path in slow for path in mine) and any(path not in slow for path in apart):
            blamed.add(node.node)
            yield _slow(node.node, " to others", max(path.measured.bandwidth for path in mine if path.measured))
    for a, b in combinations([node.node for node in probe.nodes], 2):
        rates = [path.measured.bandwidth for path in slow if {path.source, path.target} == {a, b} and path.measured]
        if rates and not blamed & {a, b}:
            yield _slow(f"{a} and {b}", "", max(rates))


def _slow(about: str, where: str, rate: float) -> Diagnosis:
    low, high = PORT_100
    if rate > high:
        cause, advice = "less than a 1 Gbit/s wire carries", "Use a cable instead of Wi-Fi, or see what else uses it"
    elif rate >= low:
        cause = "a 100 Mbit/s port or cable; 1 Gbit/s expected"
        advice = "Try another cable (all eight wires) and another port of the switch"
    else:
        cause, advice = (
            "a weak radio link, or a line through a provider",
            "Use a cable; else plan with pp and not with tp",
        )
    return Diagnosis(about, f"{rate / MEGABIT:.0f} Mbit/s{where}: {cause}", advice)


def _of_directions(apart: Sequence[NetworkPath]) -> Iterator[Diagnosis]:
    rates = {(path.source, path.target): path.measured.bandwidth for path in apart if path.measured is not None}
    for (a, b), there in rates.items():
        back = rates.get((b, a), 0.0)
        if there < FAST_ENOUGH and back > UNEQUAL * there:
            yield Diagnosis(
                f"{a} to {b}",
                f"{there / MEGABIT:.0f} Mbit/s, and {back / MEGABIT:.0f} the other way",
                "A worn cable or a port at half duplex does this (ethtool shows it); so do lines to a home",
            )


def _of_pair(about: str, pair: Sequence[PathMeasurement]) -> Iterator[Diagnosis]:
    """The paths between two nodes in both directions: time, steadiness, losses and packets."""
    round_trip, jitter = max(one.round_trip for one in pair), max(one.jitter for one in pair)
    if round_trip > FAR:
        yield Diagnosis(
            about,
            f"{1e3 * round_trip:.1f} ms there and back",
            "Keep tp inside what is near: each layer waits twice for a sum; pp waits once for a whole stage",
            wrong=False,
        )
    if jitter > max(UNSTEADY, round_trip / 2):
        yield Diagnosis(
            about,
            f"round trips of {1e3 * round_trip:.1f} ms vary by {1e3 * jitter:.1f} ms",
            "Use a cable instead of Wi-Fi, switch off its power saving, or see what else uses the line",
        )
    lost = max((one.resent for one in pair if one.resent is not None), default=0.0)
    if lost > LOSSY:
        yield Diagnosis(
            about,
            f"{lost:.2%} of packets are sent again",
            "Something drops them: a cable, a port, Wi-Fi, or a line that is too full",
        )
    small = min((one.mtu for one in pair if one.mtu is not None), default=ETHERNET_MTU)
    if small < ETHERNET_MTU:
        yield Diagnosis(
            about,
            f"packets of at most {small} bytes pass, not {ETHERNET_MTU}",
            f"A tunnel or a VPN is between; should transfers hang, set the interface's mtu to {small}",
            wrong=False,
        )


def _on_one_machine(probe: ClusterProbe, path: NetworkPath) -> bool:
    addresses = {node.node: node.address for node in probe.nodes}
    return addresses.get(path.source) == addresses.get(path.target)
