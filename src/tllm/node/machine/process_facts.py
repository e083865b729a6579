"""What a node says about its machine and its process. This module loads no torch."""

from __future__ import annotations

import os
import platform
import socket
from functools import cache

from tllm import __version__
from tllm.cluster.connection import Address, own_address
from tllm.cluster.messages import DeviceFacts, NodeFacts
from tllm.core.errors import ConfigError
from tllm.core.memory import total_bytes
from tllm.core.program import source_digest
from tllm.planner.cost.cache_room import AT_REST_BYTES, RUNTIME_BYTES

WILDCARDS = ("0.0.0.0", "::", "")
OUTSIDE = ("192.0.2.1", 9)  # an address kept for documentation (RFC 5737); nothing is sent to it


def facts_of(
    node: str,
    data: Address,
    versions: dict[str, str],
    lends: int = 0,
    memory: int | None = None,
    is_shared: bool = False,
    device: DeviceFacts | None = None,
) -> NodeFacts:
    """Describe this machine to the coordinator. `data` is the address of the data wire, `lends` the chunk server's
    port.

    `memory` is how many bytes the cluster may use, None for all; `is_shared`: all nodes of this machine that were given
    memory share them. A node that computes on a `device` has the memory of that.
    """
    return NodeFacts(
        node=node,
        host_name=socket.gethostname(),
        memory_bytes=usable_memory(memory) if device is None else device.memory_bytes,
        is_given=memory is not None,
        is_shared=memory is None or is_shared,
        cores=cores(),
        host=data[0],
        port=data[1],
        lends=lends,
        pid=os.getpid(),
        devices=() if device is None else (device,),
        versions={**programs(), **versions},
    )


def usable_memory(given: int | None, private: int = 0) -> int:
    """Bytes that plans may count on: what was given, else all. ConfigError for more than there is, or too little.

    A worker that has `private` bytes of its own at rest, more than plans count, leaves so much less of what was given.
    """
    has, surplus = total_bytes(), max(0, private - AT_REST_BYTES)
    if given is None:
        return has
    if given > has:
        raise ConfigError(f"{given} bytes of memory were given and this machine has {has}", "give it less")
    if given < RUNTIME_BYTES + surplus:
        raise ConfigError(
            f"{given} bytes of memory were given and a worker takes {RUNTIME_BYTES + surplus} before any weight",
            "give it more",
        )
    return given - surplus


def programs() -> dict[str, str]:
    """The versions of what runs here. `source` is the digest of this program's source files."""
    return {"tllm": __version__, "python": platform.python_version(), "source": source_digest()}


@cache
def cores() -> int:
    """Processors that this process was given: those that it could use when it was first asked, before it was bound."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reachable(host: str) -> str:
    """How others reach a host that this process listens on: as it is, or for a wildcard this machine's address."""
    return own_address(OUTSIDE) if host in WILDCARDS else host
