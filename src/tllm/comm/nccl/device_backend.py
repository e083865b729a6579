"""`DeviceBackend`: moves bytes between the devices of one machine; `Nccl` is NVIDIA's (or AMD's RCCL).

A backend gives each rank a process group of `torch.distributed`, of which only messages from rank to rank are used:
several of them, in both directions, are put together and carried out at once. The default process group is left to the
program.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from tllm.comm.links.transport_link import FOREVER

ENVIRONMENT = {
    "NCCL_NET": "Socket",  # what peer-to-peer copies and shared memory do not carry stays within the machine
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # `wait` raises what went wrong, where else torch would end the process
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""The only public way to choose these; torch and NCCL read them when the first process group is made."""


class MessagesUnderWay(Protocol):
    """Several messages that were started together."""

    def is_completed(self) -> bool:
        """Whether they have ended, well or not."""

    def wait(self) -> object:
        """RuntimeError if they failed; what the device is given to do from now on comes after them."""


class DeviceProcessGroup(Protocol):
    """What of a process group of `torch.distributed` is used; all calls may come from one thread at a time only."""

    def _start_coalescing(self) -> None:
        """Messages that are given from now on are carried out at `_end_coalescing`, all at once."""

    def _end_coalescing(self) -> MessagesUnderWay: ...

    def send(self, tensors: Sequence[Tensor], dst_rank: int, tag: int) -> object: ...

    def recv(self, tensors: Sequence[Tensor], src_rank: int, tag: int) -> object: ...

    def abort(self) -> None:
        """End all that is under way, and the group with it."""


class DeviceBackend(Protocol):
    """Finds which ranks of a machine it can connect, and makes their process groups."""

    name: str

    def identity(self, device: torch.device) -> str:
        """Which device of this machine this is, whatever its index in this process; "" if it cannot be connected."""

    def process_group(self, store: Store, place: int, size: int, seconds: float) -> DeviceProcessGroup:
        """That of one of `size` ranks. They find each other in the store when the first messages are sent."""


class Nccl:
    """NCCL, where torch has it, between CUDA devices."""

    name = "NCCL"

    def identity(self, device: torch.device) -> str:
        """The device's place on the PCI bus, which parts of one device (MIG) have in common: NCCL refuses those."""
        if device.type != "cuda" or not dist.is_nccl_available():
            return ""
        found: Any = torch.cuda.get_device_properties(device)
        return f"{found.pci_domain_id:x}:{found.pci_bus_id:x}:{found.pci_device_id:x}"

    def process_group(self, store: Store, place: int, size: int, seconds: float) -> DeviceProcessGroup:
        os.environ.update(ENVIRONMENT)
        nccl: Any = distributed_c10d.ProcessGroupNCCL  # builds of torch without NCCL have no such name
        options = nccl.Options()
        options._timeout = timedelta(seconds=min(seconds, FOREVER))
        group: DeviceProcessGroup = nccl(store, place, size, options)
        return group
