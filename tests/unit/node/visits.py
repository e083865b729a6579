"""Findings of healthy machines on a healthy network, for tests that make one thing ill."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tllm.node.machine.machine_facts import (
    ClusterProbe,
    Interface,
    MachineFacts,
    NetworkPath,
    NodeProbe,
    PathMeasurement,
    TorchFacts,
)
from tllm.node.topology.machine_topology import CacheLevel, MachineTopology, MemoryNode, ProcessorCore
from tllm.planner.cluster.profile import MemorySpeed, ProductSpeed

MACHINE = MachineFacts(
    system="Linux",
    python="3.11.9",
    processor="box",
    instructions=("avx2",),
    cores=8,
    quota=None,
    load=0.1,
    memory_bytes=2**34,
    memory_free_bytes=2**33,
    swap_used_bytes=0,
    open_files=1024,
    disk_free_bytes=2**36,
    clock=1.79e9,
    governors=("performance",),
    huge_pages="madvise",
    interfaces=(Interface("eth0", 1500, 1000),),
    firewalls=(),
    listen_fault="",
)
TOPOLOGY = MachineTopology(
    cores=tuple(ProcessorCore(cpus=(cpu,), socket=0, node=0, cache=0) for cpu in range(8)),
    allowed=tuple(range(8)),
    nodes=(MemoryNode(number=0, cpus=tuple(range(8)), memory_bytes=2**34, distances=(10,)),),
    caches=(CacheLevel(3, "Unified", 2**25, 8, 1),),
)
MEASURED = PathMeasurement(round_trip=3e-4, jitter=5e-5, offset=2e-4, bandwidth=1.17e8, mtu=1500, resent=0.0)


def node(name: str, address: str, rate: float = 1e11, read: float = 2e10, **machine: Any) -> NodeProbe:
    return NodeProbe(
        node=name,
        host_name="box",
        address=address,
        versions=dict(tllm="0.1.0", torch="2.13.0", python="3.11.9", source="0" * 64),
        machine=replace(MACHINE, **machine),
        topology=TOPOLOGY,
        torch=TorchFacts("2.13.0", 8, "AVX2"),
        products=(ProductSpeed("float32", 64, 1024, rate, 9), ProductSpeed("bfloat16", 64, 1024, rate, 9)),
        memory=MemorySpeed(read, 3e10),
        operation=1e-6,
    )


def visit(names: str, ways: Mapping[str, dict[str, Any] | str] | None = None) -> ClusterProbe:
    """Nodes of one letter each; `ways` says what of the way "ab" is otherwise, or why there is none."""
    ways = ways or {}
    made = []
    for a, b in itertools.permutations(names, 2):
        other = ways.get(a + b, {})
        if isinstance(other, str):
            made.append(NetworkPath(source=a, target=b, fault=other))
        else:
            made.append(NetworkPath(source=a, target=b, measured=replace(MEASURED, **other)))
    return ClusterProbe(tuple(node(name, f"10.0.0.{i}") for i, name in enumerate(names)), tuple(made))
