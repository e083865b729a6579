"""Tables as `nvidia-smi topo -m` prints them: tabs, underlined titles, a legend below, and torn ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tllm.core.errors import ConfigError
from tllm.node.topology.nvidia_topology import nvidia_topology, parse_nvidia_topology

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
FOUR = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tSYS\tSYS\tPIX\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\tSYS\tNODE\t0-31,64-95\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63,96-127\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63,96-127\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \t\t\t\t\n" + LEGEND + "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-7\t\tN/A\t\tN/A\n" + LEGEND
OLD = (
    "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tPHB\tPXB\t0-5\nGPU1\tPHB\t X \tPXB\t0-5\nmlx5_0\tPXB\tPXB\t X \t\n"
)
SWITCHED = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\t0-47\t0-1\nGPU1\tNV18\t X \tN/A\tN/A\n"


def test_four_gpus_in_pairs_and_a_card() -> None:
    found = parse_nvidia_topology(FOUR)
    assert found.names == ("GPU0", "GPU1", "GPU2", "GPU3", "NIC0")
    assert found.links[0] == ("X", "NV4", "SYS", "SYS", "PIX")
    assert found.links[3][2] == "NV4"
    assert found.nodes == (0, 0, 1, 1, None)
    assert found.cpus[2] == (*range(32, 64), *range(96, 128))
    assert found.cpus[4] == ()


def test_one_gpu_of_a_virtual_machine() -> None:
    found = parse_nvidia_topology(ONE)
    assert (found.names, found.links, found.nodes) == (("GPU0",), (("X",),), (None,))
    assert found.cpus == (tuple(range(8)),)


def test_an_older_table_without_numa_nodes() -> None:
    found = parse_nvidia_topology(OLD)
    assert found.names == ("GPU0", "GPU1", "mlx5_0")
    assert found.links[0] == ("X", "PHB", "PXB")
    assert found.nodes == (None, None, None)
    assert found.cpus == (tuple(range(6)), tuple(range(6)), ())


def test_affinities_that_span_nodes_or_are_not_known() -> None:
    found = parse_nvidia_topology(SWITCHED)
    assert found.links == (("X", "NV18"), ("NV18", "X"))
    assert (found.nodes, found.cpus[1]) == ((None, None), ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "printed nothing"),
        ("NVIDIA-SMI has failed\n", "begins with 'NVIDIA-SMI has failed', which names no GPUs"),
        ("\tGPU0\tGPU0\tCPU Affinity\n", "names no GPUs"),
        (FOUR.replace("GPU2\tSYS\tSYS\t X ", "GPU7\tSYS\tSYS\t X "), "0 links of GPU2, and 5 columns"),
        (OLD.replace("GPU1\tPHB\t X \tPXB\t0-5", "GPU1\tPHB"), "1 links of GPU1, and 3 columns"),
        (FOUR.replace("GPU0\t X \tNV4", "GPU0\t X \tWARP"), "'WARP' from GPU0 to GPU1, which is no link"),
        (FOUR.replace("GPU0\t X \tNV4", "GPU0\tNV4\tX"), "'NV4' from GPU0 to GPU0, which is no link"),
        (FOUR.replace("GPU1\tNV4", "GPU1\tSYS"), "SYS from GPU1 to GPU0, and NV4 back"),
    ],
)
def test_what_is_no_table_is_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_nvidia_topology(text)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def command(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be found as nvidia-smi, before any other."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_command_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table").write_text(FOUR)
    command(tmp_path, f'[ "$*" = "topo -m" ] && cat {tmp_path}/table', monkeypatch)
    assert nvidia_topology() == parse_nvidia_topology(FOUR)


def test_a_command_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "echo no driver is loaded; echo more; exit 9", monkeypatch)
    with pytest.raises(ConfigError, match="ended with exit code 9: no driver is loaded\n"):
        nvidia_topology()


def test_a_command_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "exec sleep 30", monkeypatch)
    monkeypatch.setattr("tllm.node.topology.nvidia_topology.SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"no answer within 0\.1 s"):
        nvidia_topology()


def test_no_command_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_topology() is None
