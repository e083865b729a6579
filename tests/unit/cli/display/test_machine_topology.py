"""What a person reads of a machine: few lines, which are those of the machine and of nothing else."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tests.unit.node.topology.machines import arm_board, laptop, machine, two_sockets, write
from tests.unit.node.visits import node
from tllm.cli.display.machine_topology import topologies_text, topology_lines
from tllm.node.machine.machine_facts import Interface, interfaces
from tllm.node.topology.machine_topology import GpuTopology, MachineTopology
from tllm.node.topology.read_topology import read_topology


def lines(root: Path, cpus: range) -> list[str]:
    return topology_lines(read_topology(root, cpus, lambda: None), interfaces(root))


def test_a_server_with_two_sockets(tmp_path: Path) -> None:
    assert lines(two_sockets(tmp_path), range(16)) == [
        "2 sockets, 2 NUMA nodes, 8 cores, 16 processors",
        "caches: L1d 8 x 48 KiB, L1i 8 x 32 KiB, L2 8 x 2 MiB, L3 2 x 36 MiB",
        "NUMA node 0: processors 0-3,8-11, 128.00 GiB, 1 GPU, 1 NVMe",
        "NUMA node 1: processors 4-7,12-15, 128.00 GiB, ens1 100 Gbit/s",
    ]


def test_a_container_that_may_use_a_part(tmp_path: Path) -> None:
    assert lines(two_sockets(tmp_path), range(2, 6))[0] == (
        "2 sockets, 2 NUMA nodes, 8 cores, 16 processors; may use 2-5 (4 cores)"
    )


def test_a_laptop(tmp_path: Path) -> None:
    card = {"operstate": "up", "speed": "-1", "wireless/x": "", "device/vendor": "x"}
    root = write(laptop(tmp_path), {f"sys/class/net/wlan0/{name}": text for name, text in card.items()})
    assert lines(root, range(8)) == [
        "1 socket, 1 NUMA node, 6 cores (2 for performance, 4 for efficiency), 8 processors",
        "caches: L2 2 x 1.2 MiB, L2 1 x 1.2 MiB, L3 1 x 12 MiB",
        "devices: wlan0 (wireless)",
        "unknown: PCIe devices",
    ]


def test_a_board_and_a_system_that_tell_little(tmp_path: Path) -> None:
    assert lines(arm_board(tmp_path / "board"), range(2)) == [
        "1 socket, 1 NUMA node, 3 cores; may use 0-1 (2 cores)",
        "unknown: NUMA nodes, caches, PCIe devices",
    ]
    assert lines(tmp_path / "other", range(0)) == [
        "its system does not tell what it is made of",
        "unknown: cores, NUMA nodes, caches, PCIe devices",
    ]


def test_gpus_by_their_links() -> None:
    links = (("X", "NV4", "SYS"), ("NV4", "X", "SYS"), ("SYS", "SYS", "X"))
    gpus = GpuTopology(("GPU0", "GPU1", "NIC0"), links, (0, 0, None), ((0,), (0,), ()))
    assert topology_lines(replace(machine(4), gpus=gpus))[-1] == "links: NV4 GPU0-GPU1; SYS GPU0-NIC0, GPU1-NIC0"
    alone = GpuTopology(("GPU0",), (("X",),), (None,), ((),))
    assert topology_lines(replace(machine(4), gpus=alone)) == ["1 socket, 1 NUMA node, 4 cores"]


def test_workers_of_one_machine_are_one_paragraph_and_others_are_not() -> None:
    one, other = node("local-0", "10.0.0.1"), node("b", "10.0.0.2")
    another = replace(other, topology=MachineTopology(cores=(), allowed=()))
    card = replace(other.machine, interfaces=(Interface("eth0", 1500, 100),))
    assert topologies_text([one, replace(one, node="local-1"), another, replace(other, machine=card)]).splitlines() == [
        "local-0, local-1: 1 socket, 1 NUMA node, 8 cores",
        "  caches: L3 1 x 32 MiB",
        "  devices: eth0 1 Gbit/s",
        "b: its system does not tell what it is made of",
        "  devices: eth0 1 Gbit/s",
        "b: 1 socket, 1 NUMA node, 8 cores",
        "  caches: L3 1 x 32 MiB",
        "  devices: eth0 100 Mbit/s",
    ]
