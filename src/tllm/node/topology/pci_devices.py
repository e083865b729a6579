"""PCIe devices that compute, store or communicate, from /sys/bus/pci."""

from __future__ import annotations

import re
from pathlib import Path

from tllm.node.topology.machine_topology import DeviceKind, PciDevice
from tllm.node.topology.system_files import number, read_file

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel", "0x15b3": "Mellanox", "0x14e4": "Broadcom"}
"""By the numbers of the PCI ID repository; another vendor's number is shown as it is."""

DISPLAY, WITH_A_SCREEN = 0x03, 0x0300
KINDS: dict[int, DeviceKind] = {DISPLAY: "GPU", 0x12: "accelerator", 0x02: "network"}
"""By the base class of the PCI code and ID assignment specification."""

NVME = 0x0108
CLASS = re.compile(r"0x[0-9a-f]{6}")


def pci_devices(root: Path) -> tuple[PciDevice, ...]:
    """The devices, by their addresses; () where the system does not tell."""
    folder = root / "sys/bus/pci/devices"
    found = [_device(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []
    return tuple(device for device in found if device is not None)


def device_node(path: Path) -> int | None:
    """The NUMA node that a device's folder names, or that of the device which it hangs on; None if unknown."""
    places = (path, path.resolve().parent) if path.exists() else ()
    return next((node for place in places if (node := number(read_file(place / "numa_node"))) is not None), None)


def _device(path: Path) -> PciDevice | None:
    text, vendor, device = (read_file(path / name) for name in ("class", "vendor", "device"))
    if not CLASS.fullmatch(text):
        return None
    code, vendor = int(text, 16) >> 8, VENDORS.get(vendor, vendor)
    kind: DeviceKind | None = "NVMe" if code == NVME else KINDS.get(code >> 8)
    if kind is None or (code == WITH_A_SCREEN and vendor not in ("NVIDIA", "AMD", "Intel")):
        return None  # a virtual machine's or a management board's screen computes nothing
    lanes, most = (number(read_file(path / f"{which}_link_width")) for which in ("current", "max"))
    return PciDevice(
        address=path.name,
        kind=kind,
        vendor=vendor,
        device=device,
        node=device_node(path),
        lanes=lanes or None,
        most_lanes=most or None,
    )
