"""What a machine is made of, in the few lines that a person wants to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tllm.core.errors import counted
from tllm.core.memory import amount
from tllm.node.machine.machine_facts import Interface, NodeProbe
from tllm.node.topology.machine_topology import (
    CacheLevel,
    GpuTopology,
    MachineTopology,
    ProcessorCore,
    sockets,
)
from tllm.node.topology.system_files import cpu_list

CACHES = {"Data": "d", "Instruction": "i"}
GIGABIT = 1000  # Mbit/s


def topologies_text(nodes: Sequence[NodeProbe]) -> str:
    """A paragraph for each machine; processes of one machine that see the same have one together."""
    machines: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        text = "\n  ".join(topology_lines(node.topology, node.machine.interfaces))
        machines.setdefault((node.host_name, text), []).append(node.node)
    return "\n".join(f"{', '.join(names)}: {text}" for (_, text), names in machines.items())


def topology_lines(topology: MachineTopology, interfaces: Sequence[Interface] = ()) -> list[str]:
    """The machine in one line, then caches, each NUMA node, GPUs, and what is unknown."""
    return [
        _summary(topology),
        *_caches(topology.caches),
        *_nodes(topology, interfaces),
        *(_gpus(topology.gpus) if topology.gpus else ()),
        *([f"unknown: {', '.join(topology.unknown)}"] if topology.unknown else []),
    ]


def _summary(topology: MachineTopology) -> str:
    if not topology.cores:
        return "its system does not tell what it is made of"
    cores, cpus = topology.cores, topology.cpus
    parts = [_count(len(sockets(cores)), "socket"), _count(len(topology.nodes) or 1, "NUMA node"), _cores(cores)]
    if len(cpus) > len(cores):
        parts.append(counted(len(cpus), "processor"))
    text = ", ".join(parts)
    used = topology.allowed
    return text if set(used) >= set(cpus) else f"{text}; may use {cpu_list(used)} ({_cores(topology.usable)})"


def _cores(cores: Sequence[ProcessorCore]) -> str:
    kinds = [kind for kind in ("performance", "efficiency") if any(core.kind == kind for core in cores)]
    each = [f"{sum(core.kind == kind for core in cores)} for {kind}" for kind in kinds]
    return _count(len(cores), "core") + (f" ({', '.join(each)})" if each else "")


def _caches(caches: Sequence[CacheLevel]) -> Iterator[str]:
    """Sizes of one cache each; the counts say how many there are."""
    found = [
        f"L{cache.level}{CACHES.get(cache.kind, '')} {cache.count} x {amount(cache.size).replace('.0 ', ' ')}"
        for cache in caches
    ]
    if found:
        yield f"caches: {', '.join(found)}"


def _nodes(topology: MachineTopology, interfaces: Sequence[Interface]) -> Iterator[str]:
    """Each NUMA node with what is next to it; a machine of one node is told in one line, if that says anything."""
    single = len(topology.nodes) < 2
    for number in [node.number for node in topology.nodes] or [0]:
        cards = [_card(card) for card in interfaces if card.node == number or (single and card.node is None)]
        kinds = sorted(device.kind for device in topology.devices if device.node == number or single)
        near = [*cards, *(f"{len(list(some))} {kind}" for kind, some in groupby(k for k in kinds if k != "network"))]
        if not single:
            (node,) = (node for node in topology.nodes if node.number == number)
            memory = [] if node.memory_bytes is None else [amount(node.memory_bytes)]
            cpus = [f"processors {cpu_list(node.cpus)}" if node.cpus else "no processors"]
            yield f"NUMA node {number}: {', '.join([*cpus, *memory, *near])}"
        elif near:
            yield f"devices: {', '.join(near)}"
    if not single and (afar := [_card(card) for card in interfaces if card.node is None]):
        yield f"on a NUMA node that is not known: {', '.join(afar)}"


def _card(card: Interface) -> str:
    if card.is_wireless:
        return f"{card.name} (wireless)"
    if card.mbits is None:
        return f"{card.name} (speed unknown)"
    is_fast = card.mbits >= GIGABIT
    return f"{card.name} {card.mbits / GIGABIT:g} Gbit/s" if is_fast else f"{card.name} {card.mbits} Mbit/s"


def _gpus(gpus: GpuTopology) -> Iterator[str]:
    """Each kind of link with the pairs that it connects, NVLinks first."""
    places = range(len(gpus.names))
    links = {(a, b): gpus.links[a][b] for a in places for b in places if a < b}
    words = [
        f"{kind} {', '.join(f'{gpus.names[a]}-{gpus.names[b]}' for (a, b), link in links.items() if link == kind)}"
        for kind in sorted(set(links.values()), key=lambda kind: (not kind.startswith("NV"), kind))
    ]
    if words:
        yield f"links: {'; '.join(words)}"


def _count(count: int, what: str) -> str:
    return counted(count, what)
