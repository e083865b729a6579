"""Reading what a machine is made of from the files of its system, which here are the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.node.topology.machines import CPU, arm_board, laptop, two_sockets, write
from tllm.core.errors import ConfigError
from tllm.node.machine.machine_facts import Interface, interfaces
from tllm.node.topology.machine_topology import CacheLevel, GpuTopology, MachineTopology, numa_nodes, sockets
from tllm.node.topology.read_topology import read_topology
from tllm.node.topology.system_files import cpu_list, parse_cpu_list


def no_gpus() -> None:
    return None


def read(root: Path, affinity: str) -> MachineTopology:
    return read_topology(root, parse_cpu_list(affinity), no_gpus)


def test_two_sockets_with_smt(tmp_path: Path) -> None:
    found = read(two_sockets(tmp_path), "0-15")
    assert [core.cpus for core in found.cores] == [(core, core + 8) for core in range(8)]
    assert [(core.socket, core.node, core.cache) for core in found.cores] == [(0, 0, 0)] * 4 + [(1, 1, 4)] * 4
    assert [(node.number, node.cpus, node.memory_bytes, node.distances) for node in found.nodes] == [
        (0, (0, 1, 2, 3, 8, 9, 10, 11), 2**37, (10, 21)),
        (1, (4, 5, 6, 7, 12, 13, 14, 15), 2**37, (21, 10)),
    ]
    assert found.caches == (
        CacheLevel(1, "Data", 48 * 2**10, 2, 8),
        CacheLevel(1, "Instruction", 32 * 2**10, 2, 8),
        CacheLevel(2, "Unified", 2**21, 2, 8),
        CacheLevel(3, "Unified", 36 * 2**20, 8, 2),
    )
    assert found.allowed == found.cpus == tuple(range(16))
    assert found.unknown == ()


def test_devices_that_matter_with_their_nodes_and_lanes(tmp_path: Path) -> None:
    found = read(two_sockets(tmp_path), "0-15")
    assert [(one.address, one.kind, one.vendor, one.node, one.lanes, one.most_lanes) for one in found.devices] == [
        ("0000:01:00.0", "NVMe", "0x144d", 0, 4, 4),
        ("0000:17:00.0", "GPU", "NVIDIA", 0, 16, 16),
        ("0000:3a:00.0", "network", "Mellanox", 1, 8, 16),
    ]
    assert interfaces(tmp_path) == (Interface("ens1", 9000, 100_000, node=1),)


@pytest.mark.parametrize("is_intel", [True, False])
def test_a_laptop_with_two_kinds_of_cores(tmp_path: Path, is_intel: bool) -> None:
    found = read(laptop(tmp_path, is_intel), "0-7")
    assert [(core.cpus, core.kind) for core in found.cores] == [
        ((0, 1), "performance"),
        ((2, 3), "performance"),
        *(((cpu,), "efficiency") for cpu in range(4, 8)),
    ]
    assert CacheLevel(2, "Unified", 1280 * 2**10, 4, 1) in found.caches
    assert CacheLevel(2, "Unified", 1280 * 2**10, 2, 2) in found.caches
    assert numa_nodes(found.cores) == sockets(found.cores) == [0]
    assert found.unknown == ("PCIe devices",)


def test_an_arm_board_that_tells_little(tmp_path: Path) -> None:
    found = read(arm_board(tmp_path), "0-1,3")
    assert [core.cpus for core in found.cores] == [(0,), (1,), (3,)], "the third is switched off"
    assert {(core.socket, core.node, core.kind) for core in found.cores} == {(0, 0, "")}
    assert [core.cache for core in found.cores] == [0, 1, 3]
    assert found.unknown == ("NUMA nodes", "caches", "PCIe devices")


def test_another_system_tells_nothing(tmp_path: Path) -> None:
    found = read_topology(tmp_path, (), no_gpus)
    assert found == MachineTopology(cores=(), allowed=(), unknown=("cores", "NUMA nodes", "caches", "PCIe devices"))


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({}, "2-9"),
        ({"sys/fs/cgroup/cpuset.cpus.effective": "4-7,12-15"}, "4-7"),
        ({"proc/self/cgroup": "0::/a.slice", "sys/fs/cgroup/a.slice/cpuset.cpus.effective": "0-3"}, "2-3"),
        ({"proc/self/cgroup": "0::/not/here", "sys/fs/cgroup/cpuset.cpus.effective": "0-3"}, "2-3"),
        ({"proc/self/cgroup": "3:cpuset:/c\n0::/", "sys/fs/cgroup/cpuset/c/cpuset.effective_cpus": "0-2"}, "2"),
        ({"proc/self/cgroup": "3:cpuset:/host/c", "sys/fs/cgroup/cpuset/cpuset.cpus": "8-11"}, "8-9"),
        ({"sys/fs/cgroup/cpuset.cpus.effective": "torn"}, "2-9"),
    ],
)
def test_a_container_may_use_a_part(tmp_path: Path, files: dict[str, str], allowed: str) -> None:
    found = read(write(two_sockets(tmp_path), files), "2-9")
    assert cpu_list(found.allowed) == allowed
    assert cpu_list(found.cpus) == "0-15", "the machine is what it is"


def test_a_part_of_a_machine_has_parts_of_its_cores(tmp_path: Path) -> None:
    found = read(two_sockets(tmp_path), "3-5,11")
    assert [(core.cpus, core.node) for core in found.usable] == [((3, 11), 0), ((4,), 1), ((5,), 1)]


def test_torn_files_are_unknown_and_no_end(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    for path in root.rglob("*list"):
        path.write_text("0-\n")
    for path in root.rglob("size"):
        path.write_text("large\n")
    found = read(root, "0-15")
    assert len(found.cores) == 16
    assert found.caches == ()
    assert [node.cpus for node in found.nodes] == [(), ()]


def test_without_a_list_the_folders_count(tmp_path: Path) -> None:
    (two_sockets(tmp_path) / CPU / "online").unlink()
    assert len(read(tmp_path, "0-15").cores) == 8


def test_gpus_are_asked_for_and_a_failure_is_one_line(tmp_path: Path) -> None:
    gpus = GpuTopology(("GPU0",), (("X",),), (0,), ((0, 1),))
    assert read_topology(tmp_path, (), lambda: gpus).gpus == gpus

    def fail() -> None:
        raise ConfigError("nvidia-smi gave no answer", "wait")

    assert read_topology(tmp_path, (), fail).gpu_fault == "nvidia-smi gave no answer"


def test_this_very_machine() -> None:
    found = read_topology()
    assert set(found.allowed) <= set(found.cpus) or not found.cores
    assert len(found.cores) <= len(found.cpus)


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8", "0,2,4-5", "10-127"])
def test_lists_of_processors_are_written_as_they_are_read(text: str) -> None:
    assert cpu_list(parse_cpu_list(text)) == text


@pytest.mark.parametrize("text", ["a", "3-1", "0-", "-1", "0-3:1/2", "٣"])
def test_what_is_no_list_of_processors(text: str) -> None:
    with pytest.raises(ValueError, match="is no range of processors"):
        parse_cpu_list(text)
