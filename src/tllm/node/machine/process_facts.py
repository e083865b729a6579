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
from tllm.core.memory import amount, total_bytes
from tllm.core.processor import group_threads, processors
from tllm.core.program import source_digest
from tllm.planner.cost.cache_room import AT_REST_BYTES, RUNTIME_BYTES

OUTSIDE = {"0.0.0.0": ("192.0.2.1", 9), "": ("192.0.2.1", 9), "::": ("2001:db8::1", 9)}
"""For each wildcard an address of what it listens to, kept for documentation (RFC 5737, RFC 3849); nothing is sent."""

WILDCARDS = tuple(OUTSIDE)

LOOPBACKS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
"""For each wildcard the address by which this machine reaches itself, also while its network is away."""


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


def usable_memory(given: int | None, at_rest: int = 0) -> int:
    """Bytes that plans may count on: what was given, else all. ConfigError for more than there is, or too little.

    A worker that has touched `at_rest` bytes before it does anything, more than plans count, leaves so much less of
    what was given.
    """
    has, surplus = total_bytes(), max(0, at_rest - AT_REST_BYTES)
    if given is None:
        return has
    if given > has:
        raise ConfigError(
            f"{amount(given)} of memory were given and this machine has {amount(has)}, "
            f"{amount(given - has)} too little",
            "give it less",
        )
    if given < (least := RUNTIME_BYTES + surplus):
        raise ConfigError(
            f"{amount(given)} of memory were given and a worker takes {amount(least)} before any weight",
            f"give it more than {(least >> 20) + 1}MiB: weights and the cache come on top (`tllm plan` says how much)",
        )
    return given - surplus


def programs() -> dict[str, str]:
    """The versions of what runs here. `source` is the digest of this program's source files."""
    return {"tllm": __version__, "python": platform.python_version(), "source": source_digest()}


@cache
def cores() -> int:
    """Processors that this process was given: `processors`, or as many as its control groups allow the time of."""
    return group_threads() or processors()


def reachable(host: str) -> str:
    """How others reach a host that this process listens on: as it is, or for a wildcard this machine's address on the
    default route. ConfigError where there is no such route."""
    if host not in OUTSIDE:
        return host
    try:
        return own_address(OUTSIDE[host])
    except ConfigError as error:
        kind, example = ("IPv6", "fd00::10") if host == "::" else ("IPv4", "192.168.1.10, or :: for that of IPv6")
        raise ConfigError(
            f"there is no default route for {kind} on this machine, which would tell by which address others reach it",
            f"name the address: --cluster-host {example}",
        ) from error
