"""Reads the topology of this machine from /sys of Linux and from nvidia-smi; elsewhere it says what is unknown."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tllm.core.errors import ConfigError
from tllm.core.memory import group_folders
from tllm.node.topology.machine_topology import (
    CacheLevel,
    CoreKind,
    GpuTopology,
    MachineTopology,
    MemoryNode,
    ProcessorCore,
)
from tllm.node.topology.nvidia_topology import nvidia_topology
from tllm.node.topology.pci_devices import pci_devices
from tllm.node.topology.system_files import SYSTEM, number, parse_cpu_list, read_file

PROCESSORS = "sys/devices/system/cpu"
CPUSETS = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
"""Where control groups of version 2, and then of version 1, say which processors they may use."""
KIBIBYTES = {"K": 2**10, "M": 2**20, "G": 2**30}
HYBRID: dict[CoreKind, str] = {"performance": "sys/devices/cpu_core/cpus", "efficiency": "sys/devices/cpu_atom/cpus"}
"""Where Linux lists the processors of each kind of an Intel processor that has both."""


def read_topology(
    root: Path = SYSTEM,
    affinity: Iterable[int] | None = None,
    ask_gpus: Callable[[], GpuTopology | None] = nvidia_topology,
) -> MachineTopology:
    """This machine; `root` is where its files are read. It takes a second where nvidia-smi is asked, by `ask_gpus`.

    `affinity` are the processors that this process is bound to, None to ask the system.
    """
    cores, nodes = processor_cores(root), memory_nodes(root)
    caches, devices = cache_levels(root, [cpu for core in cores for cpu in core.cpus]), pci_devices(root)
    gpus, fault = None, ""
    try:
        gpus = ask_gpus()
    except ConfigError as error:
        fault = error.message
    told = {"cores": cores, "NUMA nodes": nodes, "caches": caches, "PCIe devices": devices}
    return MachineTopology(
        cores=cores,
        allowed=allowed_processors(root, affinity, [cpu for core in cores for cpu in core.cpus]),
        nodes=nodes,
        caches=caches,
        devices=devices,
        gpus=gpus,
        gpu_fault=fault,
        unknown=tuple(name for name, found in told.items() if not found),
    )


def read_processors() -> MachineTopology:
    """The cores of this machine and nothing else, for those who are in a hurry."""
    cores = processor_cores(SYSTEM)
    return MachineTopology(
        cores=cores, allowed=allowed_processors(SYSTEM, None, [cpu for core in cores for cpu in core.cpus])
    )


def processor_cores(root: Path) -> tuple[ProcessorCore, ...]:
    """The cores that are online, by socket, NUMA node, last-level cache and number; () where they are not told."""
    folder = root / PROCESSORS
    online = set(_cpus(folder / "online") or _numbers(folder, "cpu"))
    node_of = {cpu: node.number for node in memory_nodes(root) for cpu in node.cpus}
    kinds, seen, cores = _kinds(root, online), set[int](), list[ProcessorCore]()
    for cpu in sorted(online):
        place = folder / f"cpu{cpu}" / "topology"
        if cpu in seen or not place.is_dir():
            continue
        siblings = _cpus(place / "core_cpus_list") or _cpus(place / "thread_siblings_list")
        cpus = tuple(sorted({cpu, *siblings} & online))
        seen.update(cpus)
        socket = number(read_file(place / "physical_package_id")) or 0
        cache = _last_level(folder / f"cpu{cpu}" / "cache", cpu)
        cores.append(
            ProcessorCore(cpus=cpus, socket=socket, node=node_of.get(cpu, 0), cache=cache, kind=kinds.get(cpu, ""))
        )
    return tuple(sorted(cores, key=lambda core: (core.socket, core.node, core.cache, core.cpus)))


def memory_nodes(root: Path) -> tuple[MemoryNode, ...]:
    """The NUMA nodes, by number; () for a kernel without them."""
    folder = root / "sys/devices/system/node"
    return tuple(
        MemoryNode(
            number=one,
            cpus=_cpus(folder / f"node{one}" / "cpulist"),
            memory_bytes=_memory_of(read_file(folder / f"node{one}" / "meminfo")),
            distances=tuple(
                distance
                for word in read_file(folder / f"node{one}" / "distance").split()
                if (distance := number(word)) is not None
            ),
        )
        for one in _numbers(folder, "node")
    )


def cache_levels(root: Path, cpus: Iterable[int]) -> tuple[CacheLevel, ...]:
    """The caches of these processors; those that are alike are counted together."""
    found = set[tuple[int, str, int, tuple[int, ...]]]()
    for cpu in cpus:
        for path in (root / PROCESSORS / f"cpu{cpu}" / "cache").glob("index[0-9]*"):
            level, size = number(read_file(path / "level")), _size(read_file(path / "size"))
            if level is not None and size is not None:
                sharing = _cpus(path / "shared_cpu_list") or (cpu,)
                found.add((level, read_file(path / "type"), size, sharing))
    counted = Counter((level, kind, size, len(sharing)) for level, kind, size, sharing in found)
    return tuple(CacheLevel(*alike, count) for alike, count in sorted(counted.items()))


def allowed_processors(root: Path, affinity: Iterable[int] | None, online: Iterable[int]) -> tuple[int, ...]:
    """Those that this process may run on: by its affinity, and by the cpuset of its control group."""
    if affinity is None:
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else online
    cpuset = next(filter(None, map(_cpus, _cpuset_files(root))), None)
    return tuple(sorted(set(affinity) & set(cpuset) if cpuset else set(affinity)))


def _cpuset_files(root: Path) -> list[Path]:
    """Where the cpuset of this process may be told."""
    return [folder / name for folder in group_folders("cpuset", root) for name in CPUSETS]


def _kinds(root: Path, online: Iterable[int]) -> dict[int, CoreKind]:
    """The kind of each processor where there are two: as Intel's are listed, or by Linux's measure of capacity."""
    listed = {cpu: kind for kind, file in HYBRID.items() for cpu in _cpus(root / file)}
    if len(set(listed.values())) > 1:
        return listed
    capacities = {
        cpu: capacity
        for cpu in online
        if (capacity := number(read_file(root / PROCESSORS / f"cpu{cpu}" / "cpu_capacity"))) is not None
    }
    most = max(capacities.values(), default=0)
    if len(set(capacities.values())) < 2:
        return {}
    return {cpu: "performance" if capacity == most else "efficiency" for cpu, capacity in capacities.items()}


def _last_level(folder: Path, cpu: int) -> int:
    """The first processor of those that share the last-level cache, this one itself where that is not told."""
    levels = {number(read_file(path / "level")) or 0: path for path in folder.glob("index[0-9]*")}
    return min(_cpus(levels[max(levels)] / "shared_cpu_list"), default=cpu) if levels else cpu


def _cpus(path: Path) -> tuple[int, ...]:
    """The processors that a file lists; () where there is none, or it lists something else."""
    try:
        return parse_cpu_list(read_file(path))
    except ValueError:
        return ()


def _numbers(folder: Path, name: str) -> list[int]:
    """The numbers of the folders that are called so: [0, 1] of node0 and node1."""
    found = (number(path.name.removeprefix(name)) for path in folder.glob(f"{name}[0-9]*"))
    return sorted(one for one in found if one is not None)


def _memory_of(meminfo: str) -> int | None:
    """MemTotal, in bytes, of a node's meminfo: `Node 0 MemTotal: 1024 kB`."""
    for line in meminfo.splitlines():
        words = line.split()
        if len(words) == 5 and words[2] == "MemTotal:" and (size := number(words[3])) is not None:
            return size * KIBIBYTES["K"]
    return None


def _size(text: str) -> int | None:
    """Bytes of a cache: "32768K"."""
    size = number(text[:-1])
    return None if size is None or text[-1:] not in KIBIBYTES else size * KIBIBYTES[text[-1:]]
