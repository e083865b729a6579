"""What in a machine's topology costs speed: threads, processors, cards and PCIe lanes that do not fit together.

All of it is advice: such a machine computes the same numbers, and the user may have no other.
"""

from __future__ import annotations

from collections.abc import Iterator

from tllm.core.errors import counted
from tllm.node.machine.machine_facts import Diagnosis, NodeProbe
from tllm.node.topology.machine_topology import numa_nodes, sockets
from tllm.node.topology.system_files import cpu_list


def of_topology(found: NodeProbe) -> Iterator[Diagnosis]:
    """One machine by itself; nothing is said of what its system does not tell."""
    yield from _of_processors(found)
    yield from _of_cards(found)
    if found.topology.gpu_fault:
        yield Diagnosis(
            found.node,
            f"how its GPUs are connected is not known: {found.topology.gpu_fault}",
            "See what `nvidia-smi topo -m` prints there",
            wrong=False,
        )


def _of_processors(found: NodeProbe) -> Iterator[Diagnosis]:
    topology, usable = found.topology, found.topology.usable
    threads, parts, nodes = found.torch.threads, sockets(usable), numa_nodes(usable)
    if usable and threads > len(usable):
        yield Diagnosis(
            found.node,
            f"{counted(threads, 'thread computes', 'threads compute')} on {counted(len(usable), 'core')}",
            f"Try --threads {len(usable)}: threads that share a core share what multiplies",
            wrong=False,
        )
    sizes = [sum(len(core.cpus) for core in topology.cores if core.socket == socket) for socket in parts]
    if len(parts) > 1 and len(topology.allowed) <= max(sizes):
        yield Diagnosis(
            found.node,
            f"the processors that it may use ({cpu_list(topology.allowed)}) lie on {len(parts)} sockets",
            "One socket has as many: give the container a cpuset there, with the memory next to it",
            wrong=False,
        )
    elif len(nodes) > 1:
        yield Diagnosis(
            found.node,
            f"its memory lies on {len(nodes)} NUMA nodes, and a process that spans them reads much of it from afar",
            f"Try --local {len(nodes)} with tp={len(nodes)} or pp={len(nodes)}: each worker then has a node of its own",
            wrong=False,
        )


def _of_cards(found: NodeProbe) -> Iterator[Diagnosis]:
    nodes = numa_nodes(found.topology.usable)
    for card in found.machine.interfaces:
        if card.node is not None and nodes and card.node not in nodes:
            yield Diagnosis(
                found.node,
                f"{card.name} is on NUMA node {card.node}, and the processors that it may use on {_words(nodes)}",
                "Give it processors of that node if it waits for the network",
                wrong=False,
            )
    for device in found.topology.devices:
        if device.lanes and device.most_lanes and device.lanes < device.most_lanes and device.kind != "NVMe":
            yield Diagnosis(
                found.node,
                f"the {device.kind} device {device.address} uses {device.lanes} of its {device.most_lanes} PCIe lanes",
                "Put it into a wider slot, or look for what shares the lanes of this one",
                wrong=False,
            )


def _words(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
