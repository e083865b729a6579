"""What an examination finds: facts of each machine, as far as its operating system tells them, and of network paths.

This module loads no torch. What a system does not tell is None or empty, and no diagnosis is made of it.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tllm.core.memory import group_memory
from tllm.core.processor import processor_name, processors, quota
from tllm.node.topology.machine_topology import MachineTopology
from tllm.node.topology.pci_devices import device_node
from tllm.node.topology.system_files import SYSTEM, number, read_file
from tllm.planner.cluster.profile import MemorySpeed, ProductSpeed

INSTRUCTIONS = (
    *("fma", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "sve", "i8mm", "bf16"),
)
"""The names in /proc/cpuinfo of what makes products fast, of x86 and of ARM."""

KIBIBYTES = 1024
IP_MTU, IPV6_MTU = 14, 24  # of Linux, which Python has no names for


class Interface(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network interface that is up. `mbits`: the speed, in Mbit/s, that both ends of its cable have negotiated;
    `node`: the NUMA node that its card is on."""

    name: str
    mtu: int
    mbits: int | None = None
    is_wireless: bool = False
    node: int | None = None


class TorchFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The build of torch: `capability` is the set of vector instructions that it uses here ("DEFAULT": none)."""

    version: str
    threads: int
    capability: str


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine. Sizes are in bytes. `quota` is how many processors its control group may use, None for all;
    `load` is the number of processes that run or wait to run.

    `firewalls` are those that are switched on; `listen_fault` is why no port can be opened, "" if one can.
    """

    system: str
    python: str
    processor: str
    instructions: tuple[str, ...]
    cores: int
    quota: float | None
    load: float
    memory_bytes: int
    memory_free_bytes: int
    swap_used_bytes: int
    open_files: int
    disk_free_bytes: int
    clock: float
    governors: tuple[str, ...]
    huge_pages: str
    interfaces: tuple[Interface, ...]
    firewalls: tuple[str, ...]
    listen_fault: str


class NodeProbe(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What one node says of itself: its machine and what that is made of, torch, and speeds as `node.machine.measure`
    gives them.

    `address` is where its tensor links listen.
    """

    node: str
    host_name: str
    address: str
    versions: dict[str, str]
    machine: MachineFacts
    topology: MachineTopology
    torch: TorchFacts
    products: tuple[ProductSpeed, ...]
    memory: MemorySpeed
    operation: float


class PathMeasurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network path from one node to another over our links, TLS included. Seconds, and bytes per second.

    `round_trip` is the median; `jitter` the mean difference between one and the next; `offset` how far the clock there
    is ahead of the one here; `mtu` the largest packet on the path, in bytes; `resent` the share of packets
    that were sent again meanwhile.
    """

    round_trip: float
    jitter: float
    offset: float
    bandwidth: float
    mtu: int | None = None
    resent: float | None = None


class NetworkPath(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """From `source` to `target`, by their names: measured, or a fault in words with what helps against it, if that is
    known."""

    source: str
    target: str
    measured: PathMeasurement | None = None
    fault: str = ""
    advice: str = ""


class ClusterProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that an examination of a cluster found. `ways` holds the network paths, by which name the JSON has them."""

    nodes: tuple[NodeProbe, ...]
    ways: tuple[NetworkPath, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """What was found about a node or about network paths, and what to do. `wrong`: it must be mended; else advice."""

    about: str
    what: str
    advice: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{self.about}: {self.what}. {self.advice}."


def machine_facts(root: Path = SYSTEM) -> MachineFacts:
    """This machine, now; `root` is where its files are read."""
    memory = memory_table(root)
    limit, used = group_memory(root)
    whole = memory.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineFacts(
        system=platform.platform(),
        python=platform.python_version(),
        processor=processor_name(root / "proc/cpuinfo"),
        instructions=instructions(root),
        cores=processors(),
        quota=quota(root),
        load=os.getloadavg()[0],
        memory_bytes=min(whole, limit or whole),
        memory_free_bytes=min(memory.get("MemAvailable", whole), limit - used if limit else whole),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        clock=time.time(),
        governors=_governors(root),
        huge_pages=_chosen(read_file(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        interfaces=interfaces(root),
        firewalls=_firewalls(root),
        listen_fault=_listen_fault(),
    )


def instructions(root: Path = SYSTEM) -> tuple[str, ...]:
    """Which of `INSTRUCTIONS` the processor has."""
    table = _table(read_file(root / "proc/cpuinfo"))
    has = set((table.get("flags") or table.get("Features") or "").split())
    return tuple(name for name in INSTRUCTIONS if name in has)


def memory_table(root: Path = SYSTEM) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    table = _table(read_file(root / "proc/meminfo"))
    return {name: int(value.split()[0]) * KIBIBYTES for name, value in table.items() if value.endswith("kB")}


def interfaces(root: Path = SYSTEM) -> tuple[Interface, ...]:
    """Interfaces that are up, without the loopback and those that have no cable or radio (bridges, tunnels)."""
    folder = root / "sys/class/net"
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (path / "device").exists() or read_file(path / "operstate") != "up":
            continue
        speed, mtu = number(read_file(path / "speed")), number(read_file(path / "mtu"))
        node = device_node(path / "device")
        found.append(Interface(path.name, mtu or 0, speed, (path / "wireless").exists(), node))
    return tuple(found)


def resent_packets(root: Path = SYSTEM) -> tuple[int, int]:
    """(packets sent, packets sent again) by TCP since the machine began; (0, 0) where the system does not say."""
    rows = [line.split() for line in read_file(root / "proc/net/snmp").splitlines() if line.startswith("Tcp:")]
    if len(rows) != 2:
        return 0, 0
    table = dict(zip(*rows, strict=True))
    return int(table["OutSegs"]), int(table["RetransSegs"])


def path_mtu(host: str) -> int | None:
    """The largest packet, in bytes, on the path to a host, as far as this system knows it; None if it does not say."""
    if sys.platform != "linux":
        return None
    is_6 = ":" in host
    family = socket.AF_INET6 if is_6 else socket.AF_INET
    level, option = (socket.IPPROTO_IPV6, IPV6_MTU) if is_6 else (socket.IPPROTO_IP, IP_MTU)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return probe.getsockopt(level, option)
        except OSError:
            return None


def _table(text: str) -> dict[str, str]:
    """Parse lines of `name : value`; of several lines with one name the first counts."""
    rows = [line.partition(":") for line in text.splitlines()]
    return {name.strip(): value.strip() for name, _, value in reversed(rows)}


def _chosen(text: str) -> str:
    """The choice in brackets, of a line such as `always [madvise] never`."""
    return text.partition("[")[2].partition("]")[0]


def _governors(root: Path) -> tuple[str, ...]:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return tuple(sorted({read_file(file) for file in files} - {""}))


def _firewalls(root: Path) -> tuple[str, ...]:
    found = []
    if "ENABLED=yes" in read_file(root / "etc/ufw/ufw.conf"):
        found.append("ufw")
    if any((root / place / "firewalld.pid").exists() for place in ("run", "var/run")):
        found.append("firewalld")
    return tuple(found)


def _listen_fault() -> str:
    try:
        with socket.create_server(("", 0)):
            return ""
    except OSError as error:
        return error.strerror or str(error)
