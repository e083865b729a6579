"""Reading a machine from the files of its system, which here are the test's own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tllm.node.machine.machine_facts import (
    Interface,
    instructions,
    interfaces,
    machine_facts,
    memory_table,
    path_mtu,
    resent_packets,
)

FILES = {
    "proc/cpuinfo": "processor : 0\nmodel name\t: A fast one\nflags\t\t: fpu sse2 avx2 fma amx_bf16\n\n"
    "processor : 1\nmodel name\t: Another\nflags : fpu\n",
    "proc/meminfo": "MemTotal:       16384 kB\nMemAvailable:    8192 kB\n"
    "SwapTotal: 1000 kB\nSwapFree: 400 kB\nHugePages: 3\n",
    "proc/net/snmp": "Ip: Forwarding\nIp: 1\nTcp: InSegs OutSegs RetransSegs\nTcp: 5 1000 7\n",
    "sys/fs/cgroup/cpu.max": "150000 100000",
    "sys/fs/cgroup/memory.max": "4194304",
    "sys/fs/cgroup/memory.current": "1048576",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/mtu": "1500",
    "sys/class/net/eth0/speed": "100",
    "sys/class/net/eth0/device/vendor": "x",
    "sys/class/net/wlan0/operstate": "up",
    "sys/class/net/wlan0/mtu": "1400",
    "sys/class/net/wlan0/speed": "-1",
    "sys/class/net/wlan0/wireless/x": "",
    "sys/class/net/wlan0/device/vendor": "x",
    "sys/class/net/eth1/operstate": "down",
    "sys/class/net/eth1/device/vendor": "x",
    "sys/class/net/br0/operstate": "up",
    "etc/ufw/ufw.conf": "# on\nENABLED=yes\n",
    "run/firewalld.pid": "1",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_processor_and_what_it_can(root: Path) -> None:
    assert machine_facts(root).processor == "A fast one"
    assert instructions(root) == ("fma", "avx2", "amx_bf16")


def test_memory_in_bytes(root: Path) -> None:
    assert memory_table(root) == dict(MemTotal=2**24, MemAvailable=2**23, SwapTotal=1024000, SwapFree=409600)


def test_interfaces_that_lead_out(root: Path) -> None:
    assert interfaces(root) == (Interface("eth0", 1500, 100), Interface("wlan0", 1400, None, is_wireless=True))


def test_packets(root: Path) -> None:
    assert resent_packets(root) == (1000, 7)


def test_the_whole_machine(root: Path) -> None:
    found = machine_facts(root)
    assert (found.memory_bytes, found.memory_free_bytes) == (2**22, 3 * 2**20), "the control group allows less"
    assert found.swap_used_bytes == 600 * 1024
    assert found.quota == 1.5
    assert found.governors == ("powersave",)
    assert found.huge_pages == "never"
    assert found.firewalls == ("ufw", "firewalld")
    assert found.listen_fault == ""


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = machine_facts(tmp_path)
    assert found.quota is None
    assert (found.interfaces, found.firewalls, found.governors, found.instructions) == ((), (), (), ())
    assert found.memory_bytes > 0
    assert resent_packets(tmp_path) == (0, 0)


def test_a_control_group_without_limits(root: Path) -> None:
    (root / "sys/fs/cgroup/cpu.max").write_text("max 100000")
    (root / "sys/fs/cgroup/memory.max").write_text("max")
    found = machine_facts(root)
    assert found.quota is None
    assert (found.memory_bytes, found.memory_free_bytes) == (2**24, 2**23)


def test_processors_that_the_groups_around_a_job_allow(root: Path) -> None:
    """As schedulers and systemd set limits: none stands at the root."""
    job = root / "sys/fs/cgroup/slurm/job_7"
    job.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/slurm/job_7\n")
    (root / "sys/fs/cgroup/cpu.max").unlink()
    (job / "cpu.max").write_text("max 100000")
    (job.parent / "cpu.max").write_text("400000 100000")
    assert machine_facts(root).quota == 4
    (job / "cpu.max").write_text("50000 100000")
    assert machine_facts(root).quota == 0.5
    old = root / "sys/fs/cgroup/cpu/job"
    old.mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/job\n0::/\n")
    (old / "cpu.cfs_period_us").write_text("100000")
    (old / "cpu.cfs_quota_us").write_text("-1")
    assert machine_facts(root).quota is None
    (old / "cpu.cfs_quota_us").write_text("200000")
    assert machine_facts(root).quota == 2


def test_no_port_to_be_had(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert machine_facts(root).listen_fault == "Permission denied"


def test_this_machines_own_packets() -> None:
    largest = path_mtu("127.0.0.1")
    assert largest is None or largest >= 1280
