"""Each rule finds what costs speed on a machine that has it, and nothing on one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.unit.node.topology.machines import laptop, machine
from tests.unit.node.visits import node
from tllm.node.doctor.machine_rules import diagnose
from tllm.node.machine.machine_facts import ClusterProbe, Diagnosis, Interface, NodeProbe, TorchFacts
from tllm.node.topology.machine_topology import MachineTopology, PciDevice
from tllm.node.topology.read_topology import read_topology


def found(topology: MachineTopology, threads: int = 1, cards: tuple[Interface, ...] = ()) -> list[Diagnosis]:
    probe = node("a", "", interfaces=cards)
    return diagnose(ClusterProbe((replace(probe, topology=topology, torch=TorchFacts("2.13.0", threads, "AVX2")),)))


def the_one(topology: MachineTopology, threads: int = 1, cards: tuple[Interface, ...] = ()) -> Diagnosis:
    (one,) = found(topology, threads, cards)
    assert not one.wrong, "it costs speed and breaks nothing"
    return one


def test_more_threads_than_cores(tmp_path: Path) -> None:
    topology = read_topology(laptop(tmp_path), range(8), lambda: None)
    one = the_one(topology, 8)
    assert (one.what, one.advice.partition(":")[0]) == ("8 threads compute on 6 cores", "Try --threads 6")
    assert found(topology, 6) == []


def test_a_cpuset_across_sockets_though_one_would_do() -> None:
    one = the_one(machine(4, 4, allowed=range(2, 6)))
    assert one.what == "the processors that it may use (2-5) lie on 2 sockets"
    assert "cpuset" in one.advice
    assert "NUMA nodes" in the_one(machine(4, 4, allowed=range(6))).what, "no socket has six"


def test_one_process_over_the_numa_nodes_of_the_machine() -> None:
    one = the_one(machine(4, 4), 8)
    assert "its memory lies on 2 NUMA nodes" in one.what
    assert "--local 2 with tp=2" in one.advice
    assert found(machine(4, 4, allowed=range(4)), 4) == []


def test_a_card_next_to_other_processors() -> None:
    card = Interface("ens1", 9000, 100_000, node=1)
    assert "ens1 is on NUMA node 1" in the_one(machine(4, 4, allowed=range(4)), 4, (card,)).what
    assert found(machine(4, 4, allowed=range(4, 8)), 4, (card,)) == []


@pytest.mark.parametrize(("lanes", "most", "count"), [(8, 16, 1), (16, 16, 0), (None, 16, 0), (8, None, 0)])
def test_a_card_with_fewer_lanes_than_it_has(lanes: int | None, most: int | None, count: int) -> None:
    card = PciDevice(address="0000:3a:00.0", kind="network", vendor="x", device="y", lanes=lanes, most_lanes=most)
    faults = found(replace(machine(4), devices=(card,)))
    assert [one.what for one in faults] == ["the network device 0000:3a:00.0 uses 8 of its 16 PCIe lanes"] * count


def test_gpus_that_cannot_be_asked() -> None:
    one = the_one(replace(machine(4), gpu_fault="nvidia-smi gave no answer within 20 s"))
    assert one.what == "how its GPUs are connected is not known: nvidia-smi gave no answer within 20 s"


def test_a_system_that_tells_nothing_has_no_fault() -> None:
    probe: NodeProbe = replace(node("a", ""), topology=MachineTopology(cores=(), allowed=(), unknown=("cores",)))
    assert diagnose(ClusterProbe((probe,))) == []
