"""Diagnoses of machines and of the network paths between them, each with what to do: pure rules over a `ClusterProbe`.

A diagnosis is `wrong` where something fails, or is many times slower than such machines can be; the rest is advice.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tllm.core.errors import counted
from tllm.node.doctor.network_rules import of_clocks, of_paths
from tllm.node.doctor.topology_rules import of_topology
from tllm.node.machine.machine_facts import ClusterProbe, Diagnosis, MachineFacts, NodeProbe

MIB, GIB = 2**20, 2**30
LEAST_MEMORY, LEAST_DISK, LEAST_FILES = 512 * MIB, GIB, 1024
MUCH_SWAP = 64 * MIB
FIRST_CLOCK = 1_767_225_600.0  # 2026-01-01: this program is younger
SLOW_HALF = 0.5
"""A node at less than this part of the median of all is told to take less work, and so is a slow dtype."""


def diagnose(probe: ClusterProbe) -> list[Diagnosis]:
    """Every diagnosis, what is wrong first."""
    diagnoses = [diagnosis for node in probe.nodes for diagnosis in of_node(node)]
    diagnoses += [*of_versions(probe), *of_speeds(probe), *of_clocks(probe), *of_paths(probe)]
    return sorted(diagnoses, key=lambda diagnosis: not diagnosis.wrong)


def of_node(found: NodeProbe) -> Iterator[Diagnosis]:
    """One machine by itself."""
    yield from _of_memory(found.node, found.machine)
    yield from _of_system(found.node, found.machine)
    yield from _of_processor(found)
    yield from of_topology(found)


def of_versions(probe: ClusterProbe) -> Iterator[Diagnosis]:
    """Nodes that run another program than most."""
    for name in sorted({name for node in probe.nodes for name in node.versions}):
        by_version: dict[str, list[str]] = {}
        for node in probe.nodes:
            by_version.setdefault(node.versions.get(name, "none"), []).append(node.node)
        if len(by_version) > 1:
            each = ", ".join(f"{version[:16]} on {' and '.join(nodes)}" for version, nodes in by_version.items())
            yield Diagnosis(
                "versions",
                f"{name} differs: {each}",
                "Install the same on every machine, or results may differ in their last bits",
                wrong=name in ("tllm", "torch", "source"),
            )


def of_speeds(probe: ClusterProbe) -> Iterator[Diagnosis]:
    """Nodes that compute or read memory far more slowly than the others."""
    if len(probe.nodes) < 2:
        return
    rates = {
        node.node: max((product.flops_per_second for product in node.products), default=0.0) for node in probe.nodes
    }
    reads = {node.node: node.memory.read for node in probe.nodes}
    for what, speeds, unit in (("computes", rates, "GFLOP/s"), ("reads memory", reads, "GB/s")):
        usual = statistics.median(speeds.values())
        for node, speed in speeds.items():
            if speed < SLOW_HALF * usual:
                yield Diagnosis(
                    node,
                    f"{what} at {speed / 1e9:.3g} {unit}, {speed / usual:.0%} of what is usual here",
                    "Give it fewer layers (layers=…) or a smaller share (shares=…), or leave it out",
                    wrong=False,
                )


def _of_memory(node: str, machine: MachineFacts) -> Iterator[Diagnosis]:
    free, used = machine.memory_free_bytes, machine.swap_used_bytes
    if free < LEAST_MEMORY:
        yield Diagnosis(
            node, f"{free / MIB:.0f} MiB of memory are free", "End other programs: a worker alone takes 300 MiB"
        )
    if used > MUCH_SWAP:
        yield Diagnosis(
            node,
            f"{used / MIB:.0f} MiB lie in swap",
            "End other programs, or swap off: weights that are swapped out make every token wait for the disk",
            wrong=free < used,
        )
    if machine.disk_free_bytes < LEAST_DISK:
        yield Diagnosis(
            node, f"{machine.disk_free_bytes / MIB:.0f} MiB of disk are free", "Make room before saves or downloads"
        )


def _of_system(node: str, machine: MachineFacts) -> Iterator[Diagnosis]:
    if machine.open_files < LEAST_FILES:
        yield Diagnosis(
            node, f"a process may open {machine.open_files} files", f"Run `ulimit -n {4 * LEAST_FILES}` first"
        )
    if machine.clock < FIRST_CLOCK:
        yield Diagnosis(
            node, "its clock stands before 2026", "Set it (timedatectl set-ntp true): certificates are refused"
        )
    if machine.listen_fault:
        yield Diagnosis(
            node,
            f"no port can be opened ({machine.listen_fault})",
            "See what forbids it: a sandbox, or a rule of the system. Other nodes cannot reach this one",
        )
    for name in machine.firewalls:
        yield Diagnosis(
            node,
            f"the firewall {name} is on",
            "If other machines do not reach this one, let TCP from them in (ufw allow from ADDRESS; "
            "firewall-cmd --zone=trusted --add-source=ADDRESS)",
            wrong=False,
        )
    for one in machine.interfaces:
        if one.mbits is not None and one.mbits <= 100:
            yield Diagnosis(
                node,
                f"{one.name} has agreed on {one.mbits} Mbit/s with the other end of its cable",
                "Try another cable (all eight wires, Cat 5e or better) and another port: 1000 is usual",
            )


def said_of_load(load: float, cores: int) -> str:
    """That other programs want so many of a machine's processors."""
    if load > cores:
        return f"other programs want {load:.1f} processors, and it has {cores}"
    return f"other programs keep {load:.1f} of {counted(cores, 'processor')} busy"


def _of_processor(found: NodeProbe) -> Iterator[Diagnosis]:
    node, machine = found.node, found.machine
    if machine.quota is not None and machine.quota < machine.cores:
        threads = counted(max(1, int(machine.quota)), "thread")
        yield Diagnosis(
            node,
            f"its control group may use {machine.quota:g} of {counted(machine.cores, 'processor')}",
            f"It computes with {threads} unless --threads says more: give it more",
            wrong=False,
        )
    if machine.load > machine.cores / 2:
        yield Diagnosis(
            node,
            said_of_load(machine.load, machine.cores),
            "End them, or expect every step to wait for this node",
            wrong=False,
        )
    if found.torch.capability == "DEFAULT" and {"avx2", "avx512f"} & set(machine.instructions):
        yield Diagnosis(
            node,
            "torch uses none of the processor's vector instructions",
            "Unset ATEN_CPU_CAPABILITY, or install torch's official build",
        )
    if "powersave" in machine.governors:
        yield Diagnosis(
            node,
            "its processors are governed by powersave",
            "`cpupower frequency-set -g performance` may make the first tokens after a pause faster",
            wrong=False,
        )
    if machine.huge_pages == "never":
        yield Diagnosis(
            node,
            "transparent huge pages are off",
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` makes large weights faster to read",
            wrong=False,
        )
    yield from _of_dtypes(found)


def _of_dtypes(found: NodeProbe) -> Iterator[Diagnosis]:
    """Of products of several rows that both dtypes were measured with: a busy machine had no time for others."""
    rates: dict[str, dict[tuple[int, int], float]] = {"float32": {}, "bfloat16": {}}
    for product in found.products:
        if product.dtype in rates and product.rows > 1:
            rates[product.dtype][product.rows, product.width] = product.flops_per_second
    full, half = rates["float32"], rates["bfloat16"]
    if not (both := full.keys() & half.keys()):
        return
    part = max(half[shape] for shape in both) / max(full[shape] for shape in both)
    if part < SLOW_HALF:
        yield Diagnosis(
            found.node,
            f"computes in bfloat16 at {part:.0%} of its speed in float32",
            "If memory allows, --dtype float32 reads a prompt faster here",
            wrong=False,
        )
