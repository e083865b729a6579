"""Each rule finds its own illness and names who is ill; healthy machines have no findings at all."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.node.visits import node, visit
from tllm.node.doctor.machine_rules import diagnose
from tllm.node.machine.machine_facts import ClusterProbe, Interface, TorchFacts
from tllm.planner.cluster.profile import ProductSpeed

MBIT = 1e6 / 8


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_nothing_is_found_where_nothing_is(names: str) -> None:
    assert diagnose(visit(names)) == []


@pytest.mark.parametrize(
    ("machine", "what", "advice", "wrong"),
    [
        (dict(memory_free_bytes=300 * 2**20), "300 MiB of memory are free", "End other programs", True),
        (dict(swap_used_bytes=2**34), "16384 MiB lie in swap", "wait for the disk", True),
        (dict(swap_used_bytes=2**30), "1024 MiB lie in swap", "wait for the disk", False),
        (dict(disk_free_bytes=2**20), "1 MiB of disk are free", "Make room", True),
        (dict(open_files=256), "may open 256 files", "ulimit -n 4096", True),
        (dict(clock=0.0), "clock stands before 2026", "timedatectl", True),
        (dict(listen_fault="Permission denied"), "no port can be opened (Permission denied)", "sandbox", True),
        (dict(firewalls=("ufw",)), "the firewall ufw is on", "ufw allow", False),
        (dict(interfaces=(Interface("eth0", 1500, 100),)), "eth0 has agreed on 100 Mbit/s", "another cable", True),
        (dict(quota=1.5), "may use 1.5 of 8 processors", "It computes with 1 thread unless", False),
        (dict(load=5.0), "keep 5.0 of 8 processors busy", "End them", False),
        (dict(load=12.5), "want 12.5 processors, and it has 8", "End them", False),
        (dict(governors=("powersave",)), "governed by powersave", "cpupower", False),
        (dict(huge_pages="never"), "huge pages are off", "madvise", False),
    ],
)
def test_what_is_wrong_with_a_machine(machine: dict[str, Any], what: str, advice: str, wrong: bool) -> None:
    (found,) = diagnose(ClusterProbe((node("a", ""), node("b", "", **machine))))
    assert found.about == "b"
    assert what in found.what
    assert advice in found.advice
    assert found.wrong is wrong


@pytest.mark.parametrize("machine", [dict(interfaces=(Interface("wlan0", 1500, None, True),)), dict(quota=8.0)])
def test_what_a_system_does_not_tell_is_no_finding(machine: dict[str, Any]) -> None:
    assert diagnose(ClusterProbe((node("a", "", **machine),))) == []


def test_torch_without_vectors_and_a_slow_dtype() -> None:
    healthy = node("a", "")
    blind = replace(healthy, torch=TorchFacts("2.13.0", 8, "DEFAULT"))
    assert "none of the processor's vector instructions" in diagnose(ClusterProbe((blind,)))[0].what
    slow = replace(
        healthy, products=(ProductSpeed("float32", 8, 64, 1e11, 3), ProductSpeed("bfloat16", 8, 64, 2e10, 3))
    )
    (found,) = diagnose(ClusterProbe((slow,)))
    assert "bfloat16 at 20% of its speed in float32" in found.what
    assert not found.wrong


def test_a_dtype_that_a_busy_machine_had_no_time_to_measure_is_not_called_slow() -> None:
    """Seen on a machine whose processors nine other programs wanted: of bfloat16 only one row was measured."""
    full = [ProductSpeed("float32", rows, 1024, rate, 3) for rows, rate in ((1, 1e8), (8, 2e9), (64, 8e9), (512, 4e10))]
    products = (*full, ProductSpeed("bfloat16", 1, 1024, 1e7, 3))
    assert diagnose(ClusterProbe((replace(node("a", ""), products=products),))) == []
    products = (*products, ProductSpeed("bfloat16", 8, 1024, 1.5e9, 3))
    assert diagnose(ClusterProbe((replace(node("a", ""), products=products),))) == []


def test_a_node_that_is_slower_than_the_others() -> None:
    (found,) = diagnose(ClusterProbe((node("a", ""), node("b", "", rate=3e10), node("c", ""))))
    assert (found.about, found.wrong) == ("b", False)
    assert "30 GFLOP/s, 30% of what is usual" in found.what
    (found,) = diagnose(ClusterProbe((node("a", ""), node("b", "", read=5e9), node("c", ""))))
    assert "reads memory at 5 GB/s" in found.what


@pytest.mark.parametrize(("name", "wrong"), [("torch", True), ("source", True), ("python", False)])
def test_versions_that_differ(name: str, wrong: bool) -> None:
    other = node("b", "")
    other = replace(other, versions={**other.versions, name: "other"})
    (found,) = diagnose(ClusterProbe((node("a", ""), other)))
    assert found.wrong is wrong
    assert found.what.startswith(f"{name} differs")
    assert "other on b" in found.what


def everywhere(name: str, names: str, **other: Any) -> dict[str, Any]:
    return {a + b: other for a in names for b in names if a != b and name in (a, b)}


def test_a_slow_port_is_one_nodes_where_the_others_are_fast() -> None:
    (found,) = diagnose(visit("abc", everywhere("b", "abc", bandwidth=94 * MBIT)))
    assert found.about == "b"
    assert found.what == "94 Mbit/s to others: a 100 Mbit/s port or cable; 1 Gbit/s expected"
    assert found.wrong


def test_a_slow_way_between_two_is_nobodys_own() -> None:
    (found,) = diagnose(visit("ab", everywhere("b", "ab", bandwidth=94 * MBIT)))
    assert found.about == "a and b"
    found_all = diagnose(visit("abc", {one: dict(bandwidth=94 * MBIT) for one in ("ab", "ba", "ac", "ca", "bc", "cb")}))
    assert [one.about for one in found_all] == ["a and b", "a and c", "b and c"]
    (found,) = diagnose(visit("abc", {one: dict(bandwidth=94 * MBIT) for one in ("ab", "ba")}))
    assert found.about == "a and b"


@pytest.mark.parametrize(
    ("rate", "words"), [(9, "weak radio link"), (94, "100 Mbit/s port"), (300, "less than a 1 Gbit/s wire carries")]
)
def test_what_a_rate_means(rate: float, words: str) -> None:
    assert words in diagnose(visit("ab", everywhere("b", "ab", bandwidth=rate * MBIT)))[0].what


def test_processes_of_one_machine_share_no_cable() -> None:
    both = visit("ab", everywhere("b", "ab", bandwidth=94 * MBIT, mtu=1400, round_trip=0.1))
    assert diagnose(replace(both, nodes=(node("a", "10.0.0.1"), node("b", "10.0.0.1")))) == []


def test_one_direction_that_is_slow() -> None:
    found = diagnose(visit("ab", {"ab": dict(bandwidth=50 * MBIT), "ba": dict(bandwidth=900 * MBIT)}))
    (one,) = [one for one in found if one.about == "a to b"]
    assert "50 Mbit/s, and 900 the other way" in one.what
    assert "half duplex" in one.advice


@pytest.mark.parametrize(
    ("other", "words", "wrong"),
    [
        (dict(round_trip=0.02), "20.0 ms there and back", False),
        (dict(jitter=0.004), "vary by 4.0 ms", True),
        (dict(resent=0.02), "2.00% of packets", True),
        (dict(mtu=1400), "at most 1400 bytes", False),
    ],
)
def test_a_way_that_is_ill(other: dict[str, Any], words: str, wrong: bool) -> None:
    (found,) = diagnose(visit("ab", {"ba": other}))
    assert found.about == "a and b"
    assert words in found.what
    assert found.wrong is wrong


def test_what_is_not_measured_is_no_finding() -> None:
    assert diagnose(visit("ab", everywhere("b", "ab", mtu=None, resent=None))) == []


@pytest.mark.parametrize(("offset", "words"), [(-12.5, "12.5 s behind that of a"), (60.0, "60.0 s ahead of that of a")])
def test_clocks(offset: float, words: str) -> None:
    (found,) = diagnose(visit("abc", {"ac": dict(offset=offset), "ca": dict(offset=-offset)}))
    assert found.about == "c"
    assert words in found.what


def test_who_cannot_be_reached() -> None:
    (found,) = diagnose(visit("abc", {"ab": "timed out", "cb": "timed out"}))
    assert found.about == "b"
    assert found.what == "no other node reaches it (timed out)"
    (found,) = diagnose(visit("abc", {"ab": "timed out"}))
    assert (found.about, found.what, found.wrong) == ("a to b", "timed out", True)


def test_what_is_wrong_comes_before_advice() -> None:
    found = diagnose(ClusterProbe((node("a", "", firewalls=("ufw",), open_files=10),)))
    assert [one.wrong for one in found] == [True, False]
    assert str(found[1]).startswith("a: the firewall ufw is on. If other machines")
