"""How ranks of one machine share its cores: by rules that hold for every machine, and on machines that are known."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tllm
from tests.unit.node.topology.machines import in_words, machine
from tllm.core.errors import ConfigError
from tllm.node.coordinator import forming
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.topology import numa_binding
from tllm.node.topology.machine_topology import MachineTopology, numa_nodes
from tllm.node.topology.numa_binding import NumaBinding, bind_ranks, binding_of, check_numa_binding


def shares(topology: MachineTopology, ranks: int, threads: int = 1, asked: NumaBinding = "exclusive") -> list[str]:
    return in_words(bind_ranks(topology, asked, ranks, threads).cpus)


def test_two_ranks_have_a_numa_node_each() -> None:
    assert shares(machine(4, 4, threads=2), 2, 8) == ["0-7", "8-15"]


def test_four_ranks_have_half_a_node_each_and_neighbours_are_next_to_each_other() -> None:
    assert shares(machine(4, 4, threads=2), 4, 4) == ["0-3", "4-7", "8-11", "12-15"]


def test_a_rank_for_which_one_of_its_nodes_is_enough_has_that_one() -> None:
    assert shares(machine(4, 4, 4, 4), 2, 8) == ["0-7", "8-15"]
    assert shares(machine(4, 4, 4, 4), 2, 4) == ["0-3", "8-11"]


def test_unequal_nodes_have_unequal_numbers_of_ranks() -> None:
    assert shares(machine(6, 2), 4, 2) == ["0-1", "2-3", "4-5", "6-7"]
    assert shares(machine(6, 3), 3, 3) == ["0-2", "3-5", "6-8"]


def test_threads_count_more_than_nodes() -> None:
    """By nodes one of the ranks would have fewer processors than threads."""
    assert shares(machine(3, 1), 2, 2) == ["0-1", "2-3"]


def test_only_what_this_process_was_given_is_divided() -> None:
    assert shares(machine(4, 4, threads=2, allowed=[2, 3, 4, 8, 9, 10, 11]), 2, 3) == ["2-4", "8-11"]
    assert shares(machine(4, 4, allowed=[1, 2]), 2) == ["1", "2"]


def test_both_kinds_of_cores_are_shared_alike() -> None:
    assert shares(machine(8, kinds="PPPPEEEE"), 2, 4) == ["0-1,4-5", "2-3,6-7"]
    assert shares(machine(6, kinds="PPPEEE"), 2, 3) == ["0,3-4", "1-2,5"]


def test_by_node_ranks_share_their_nodes() -> None:
    assert shares(machine(4, 4), 4, 2, "node") == ["0-3", "0-3", "4-7", "4-7"]
    assert shares(machine(2, 2, 2, 2), 2, 4, "node") == ["0-3", "4-7"]


def test_by_itself_only_on_machines_of_several_numa_nodes() -> None:
    assert shares(machine(4, 4), 2, 4, "auto") == ["0-3", "4-7"]
    found = bind_ranks(machine(8), "auto", 2, 4)
    assert (found.cpus, found.reason) == ((), "")
    assert shares(machine(4, 4, allowed=range(4)), 2, 2, "auto") == [], "of two nodes one may be used"


@pytest.mark.parametrize(
    ("topology", "ranks", "threads", "reason"),
    [
        (machine(2, threads=2), 3, 1, "3 workers share 2 cores"),
        (machine(4, 4), 2, 5, "2 workers of 5 threads each need more than the 8 processors there are"),
        (MachineTopology(cores=(), allowed=(0, 1)), 2, 1, "does not tell which cores it has"),
    ],
)
def test_where_nobody_is_bound_there_is_a_reason(
    topology: MachineTopology, ranks: int, threads: int, reason: str
) -> None:
    found = bind_ranks(topology, "exclusive", ranks, threads)
    assert found.cpus == ()
    assert reason in found.reason


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(1, 3),
    st.text("PE", max_size=20),
    st.integers(2, 12),
    st.integers(1, 6),
    st.data(),
)
def test_no_core_is_shared_and_every_thread_has_a_processor(
    nodes: list[int], smt: int, kinds: str, ranks: int, threads: int, data: st.DataObject
) -> None:
    whole = machine(*nodes, threads=smt, kinds=kinds)
    allowed = data.draw(st.sets(st.sampled_from(whole.cpus))) if whole.cpus else set()
    topology = machine(*nodes, threads=smt, kinds=kinds, allowed=sorted(allowed))
    found = bind_ranks(topology, "exclusive", ranks, threads)
    if not found.cpus:
        least = len(allowed) // smt  # whole cores that there are at least, if each is given as a whole
        assert len(topology.usable) < ranks or threads > least // ranks, found.reason
        return
    assert len(found.cpus) == ranks
    assert all(len(cpus) >= threads and set(cpus) <= allowed for cpus in found.cpus)
    cores = [{core.cpus[0] for core in topology.within(cpus)} for cpus in found.cpus]
    assert sum(map(len, cores)) == len(set().union(*cores)), "no core has two ranks"
    spread = [numa_nodes(topology.within(cpus)) for cpus in found.cpus]
    assert spread == sorted(spread), "neighbours in the plan are neighbours on the machine"


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two NUMA nodes, of which no other test can hold the claim."""
    monkeypatch.setattr(numa_binding, "read_processors", lambda: machine(8, 8))
    monkeypatch.setattr(numa_binding, "CLAIM", f"\0tllm-test-{os.getpid()}")


def test_of_two_runs_that_do_not_know_each_other_one_binds(sixteen: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with binding_of("auto", 2, 8) as first:
        assert in_words(first.cpus) == ["0-7", "8-15"]
        assert first.of(1) == tuple(range(8, 16))
        assert first.of(2) == (), "a worker beside them"
        with binding_of("auto", 2, 8) as second:
            assert second.cpus == ()
        with binding_of("exclusive", 2, 8) as asked_for:
            assert asked_for.cpus == first.cpus
    with binding_of("auto", 2, 8) as after:
        assert after.cpus == first.cpus
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == said[3] == "workers are bound to processors 0-7 and 8-15"
    assert said[1] == "workers are not bound: another run on this machine has bound its workers"
    assert "perhaps to the same cores" in said[2]


def test_a_claim_ends_with_its_process(sixteen: None) -> None:
    """However it ends: the system closes its sockets."""
    name = numa_binding.CLAIM
    code = f"import socket, time; s = socket.socket(socket.AF_UNIX); s.bind({name!r}); print(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with binding_of("auto", 2, 8) as found:
            assert found.cpus == ()
        other.kill()
    with binding_of("auto", 2, 8) as found:
        assert found.cpus


def test_what_was_asked_for_and_cannot_be_is_a_warning(sixteen: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for asked, level in (("auto", logging.INFO), ("exclusive", logging.WARNING)):
        with binding_of(asked, 17, 1) as found:  # type: ignore[arg-type]
            assert found.cpus == ()
        assert caplog.records[-1].levelno == level
        assert caplog.records[-1].getMessage() == "workers are not bound: 17 workers share 16 cores"


@pytest.mark.parametrize(("asked", "ranks"), [("none", 4), ("exclusive", 1), ("auto", 0)])
def test_nothing_to_bind(asked: NumaBinding, ranks: int, sixteen: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with binding_of(asked, ranks, 1) as found, socket.socket(socket.AF_UNIX) as free:
        free.bind(numa_binding.CLAIM)
        assert found.cpus == ()
    assert caplog.records == []


def run_bound(cpus: Sequence[int]) -> list[str]:
    """A process that binds itself and begins a thread: its processors, those of the thread, and what it counts."""
    code = (
        "import os, threading; from tllm.node.machine.process_facts import cores; from tllm.node.topology.numa_binding "
        f"import bind; cores(); bind({tuple(cpus)!r}); told = lambda: print(sorted(os.sched_getaffinity(0))); told(); "
        "t = threading.Thread(target=told); t.start(); t.join(); print(cores())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(tllm.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return [*done.stdout.split("\n")[:3], done.stderr.strip()]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to processors")
def test_a_bound_process_still_counts_the_processors_it_was_given() -> None:
    given = sorted(os.sched_getaffinity(0))
    assert run_bound(given[-1:]) == [f"[{given[-1]}]", f"[{given[-1]}]", str(len(given)), ""]
    assert run_bound(()) == [str(given), str(given), str(len(given)), ""]
    *rest, said = run_bound([2**14])
    assert rest == [str(given), str(given), str(len(given))]
    assert "cannot be bound to processors 16384 (Invalid argument) and runs on any" in said


def test_a_word_that_is_no_binding() -> None:
    check_numa_binding("node")
    with pytest.raises(ConfigError, match="numa_binding is 'socket'"):
        check_numa_binding("socket")


@pytest.mark.parametrize("asked", ["auto", "exclusive"])
def test_workers_of_another_device_are_not_bound_by_themselves(
    asked: NumaBinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_processors = ClusterOptions(numa_binding=asked)
    assert forming.numa_binding(on_processors) == asked
    monkeypatch.setattr(forming, "choose_device", lambda wanted: torch.device("meta"))
    assert forming.numa_binding(on_processors) == ("none" if asked == "auto" else asked)
