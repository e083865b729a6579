"""Machines that tests are told of by files as Linux writes them, and by texts as nvidia-smi prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tllm.node.topology.machine_topology import MachineTopology, ProcessorCore
from tllm.node.topology.system_files import cpu_list

CPU, NODE = "sys/devices/system/cpu", "sys/devices/system/node"


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def processor(cpu: int, siblings: str, socket: int, caches: Sequence[tuple[int, str, str, str]]) -> dict[str, str]:
    """One processor's files; `caches` are (level, type, size, processors that share it)."""
    here = f"{CPU}/cpu{cpu}"
    files = {
        f"{here}/topology/core_cpus_list": siblings,
        f"{here}/topology/physical_package_id": str(socket),
    }
    for index, (level, kind, size, shared) in enumerate(caches):
        place = f"{here}/cache/index{index}"
        files |= {f"{place}/level": str(level), f"{place}/type": kind, f"{place}/size": size}
        files |= {f"{place}/shared_cpu_list": shared}
    return files


def two_sockets(root: Path) -> Path:
    """A server: two sockets of four cores with two threads each, a NUMA node each, and a fast card on the second."""
    files = {f"{CPU}/online": "0-15", f"{NODE}/online": "0-1"}
    for cpu in range(16):
        core, socket = cpu % 8, cpu % 8 // 4
        pair, last = f"{core},{core + 8}", f"{4 * socket}-{4 * socket + 3},{4 * socket + 8}-{4 * socket + 11}"
        files |= processor(
            cpu,
            pair,
            socket,
            [
                *((1, kind, size, pair) for kind, size in (("Data", "48K"), ("Instruction", "32K"))),
                (2, "Unified", "2048K", pair),
                (3, "Unified", "36M", last),
            ],
        )
    for node in (0, 1):
        here = f"{NODE}/node{node}"
        files[f"{here}/cpulist"] = f"{4 * node}-{4 * node + 3},{4 * node + 8}-{4 * node + 11}"
        files[f"{here}/meminfo"] = f"Node {node} MemTotal:       134217728 kB\nNode {node} MemFree:    1 kB"
        files[f"{here}/distance"] = "10 21" if node == 0 else "21 10"
    pci = "sys/bus/pci/devices"
    for address, kind, vendor, node, lanes, most in (
        ("0000:17:00.0", "0x030200", "0x10de", "0", "16", "16"),
        ("0000:3a:00.0", "0x020000", "0x15b3", "1", "8", "16"),
        ("0000:01:00.0", "0x010802", "0x144d", "0", "4", "4"),
        ("0000:02:00.0", "0x030000", "0x1a03", "0", "255", "1"),  # the screen of a management board
        ("0000:00:1f.0", "0x060100", "0x8086", "0", "", ""),
    ):
        files |= {f"{pci}/{address}/class": kind, f"{pci}/{address}/vendor": vendor, f"{pci}/{address}/device": "0x1"}
        files |= {f"{pci}/{address}/numa_node": node, f"{pci}/{address}/current_link_width": lanes}
        files |= {f"{pci}/{address}/max_link_width": most}
    files["sys/class/net/ens1/operstate"] = "up"
    files["sys/class/net/ens1/speed"] = "100000"
    files["sys/class/net/ens1/mtu"] = "9000"
    files["sys/class/net/ens1/device/numa_node"] = "1"
    return write(root, files)


def laptop(root: Path, is_intel: bool = True) -> Path:
    """One NUMA node: two performance cores of two threads each and four efficiency cores; Intel's kernels list their
    processors, others tell the capacity of each."""
    files = {f"{CPU}/online": "0-7", f"{NODE}/node0/cpulist": "0-7"}
    for cpu in range(8):
        is_fast = cpu < 4
        pair = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if is_fast else str(cpu)
        second = pair if is_fast else "4-7"
        files |= processor(cpu, pair, 0, [(2, "Unified", "1280K", second), (3, "Unified", "12M", "0-7")])
        if not is_intel:
            files[f"{CPU}/cpu{cpu}/cpu_capacity"] = "1024" if is_fast else "400"
    if is_intel:
        files |= {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"}
    return write(root, files)


def arm_board(root: Path) -> Path:
    """Four cores of an older kernel: no NUMA nodes, no caches, no sockets, no PCI, one processor switched off."""
    files = {f"{CPU}/online": "0-1,3"}
    for cpu in range(4):
        files[f"{CPU}/cpu{cpu}/topology/thread_siblings_list"] = str(cpu)
        files[f"{CPU}/cpu{cpu}/topology/physical_package_id"] = "-1"
    return write(root, files)


def machine(*nodes: int, threads: int = 1, kinds: str = "", allowed: Sequence[int] | None = None) -> MachineTopology:
    """A machine with so many cores on each NUMA node; the threads of a core are numbered next to each other.

    `kinds` has a P or an E for each core, in order.
    """
    cores, first = list[ProcessorCore](), 0
    for node, count in enumerate(nodes):
        start = first
        for _ in range(count):
            cpus = tuple(range(first, first + threads))
            kind = {"": "", "P": "performance", "E": "efficiency"}[kinds[len(cores) : len(cores) + 1]]
            cores.append(ProcessorCore(cpus=cpus, socket=node, node=node, cache=start, kind=kind))  # type: ignore[arg-type]
            first += threads
    return MachineTopology(cores=tuple(cores), allowed=tuple(range(first)) if allowed is None else tuple(allowed))


def in_words(shares: Sequence[Sequence[int]]) -> list[str]:
    """As the kernel would list them."""
    return [cpu_list(share) for share in shares]
