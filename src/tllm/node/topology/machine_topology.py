"""`MachineTopology`: what a machine is made of, as far as its operating system tells. Records only; nothing is read
here.

A processor is what the system schedules threads on; a core has one or, with simultaneous multithreading (SMT), several
of them, which share its arithmetic units. What is not told is empty, and `unknown` says so in words.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

CoreKind = Literal["", "performance", "efficiency"]
DeviceKind = Literal["GPU", "accelerator", "network", "NVMe"]


class ProcessorCore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One core. `cpus`: its processors that are online. `cache`: the first processor of those that it shares its
    last-level cache with. `kind` where a machine has cores of two kinds, else ""."""

    cpus: tuple[int, ...]
    socket: int
    node: int
    cache: int
    kind: CoreKind = ""


class MemoryNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NUMA node: memory, and the processors that are next to it, of which there may be none.

    `distances`: how far the memory of each node is, as firmware says it; 10 is its own.
    """

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int | None = None
    distances: tuple[int, ...] = ()


class CacheLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All caches of a machine that are alike: `count` of `size` bytes, each shared by so many processors."""

    level: int
    kind: str
    size: int
    shared_by: int
    count: int


class PciDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A PCIe device that computes, stores or communicates. `lanes` it uses, of the `most_lanes` that it has."""

    address: str
    kind: DeviceKind
    vendor: str
    device: str
    node: int | None = None
    lanes: int | None = None
    most_lanes: int | None = None


class GpuTopology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `nvidia-smi topo -m` says: `links[a][b]` is how `names[a]` reaches `names[b]`, both GPUs or network cards.

    "NV4" are four NVLinks together; of the ways over PCIe "PIX", "PXB", "PHB", "NODE" and "SYS" each is longer than the
    one before. `nodes` and `cpus` are the NUMA node and the processors next to each, None and () where it does not say.
    """

    names: tuple[str, ...]
    links: tuple[tuple[str, ...], ...]
    nodes: tuple[int | None, ...]
    cpus: tuple[tuple[int, ...], ...]


class MachineTopology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine. `allowed` are the processors that this process may run on, by its affinity and its control group.

    `gpu_fault` is why `nvidia-smi`, which is there, told nothing.
    """

    cores: tuple[ProcessorCore, ...]
    allowed: tuple[int, ...]
    nodes: tuple[MemoryNode, ...] = ()
    caches: tuple[CacheLevel, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    gpus: GpuTopology | None = None
    gpu_fault: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def cpus(self) -> tuple[int, ...]:
        """All processors that are online."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def usable(self) -> tuple[ProcessorCore, ...]:
        """The cores that this process may run on, with those of their processors that it may run on."""
        return self.within(self.allowed)

    def within(self, cpus: Collection[int]) -> tuple[ProcessorCore, ...]:
        """The cores that have some of these processors, with these alone."""
        allowed = set(cpus)
        kept = [(core, tuple(cpu for cpu in core.cpus if cpu in allowed)) for core in self.cores]
        return tuple(msgspec.structs.replace(core, cpus=some) for core, some in kept if some)


def sockets(cores: Collection[ProcessorCore]) -> list[int]:
    """The numbers of the sockets that these cores are in."""
    return sorted({core.socket for core in cores})


def numa_nodes(cores: Collection[ProcessorCore]) -> list[int]:
    """The numbers of the NUMA nodes that these cores are in."""
    return sorted({core.node for core in cores})
