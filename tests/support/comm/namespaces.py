"""Network namespaces, as a thread enters them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """Move the calling thread to a host, for good: the sockets that it opens are that host's."""
    with open(f"/run/netns/{namespace}") as handle:
        _set_network(handle)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and those that it starts meanwhile, are on a host."""
    with open("/proc/thread-self/ns/net") as before:
        enter(namespace)
        try:
            yield
        finally:
            _set_network(before)


def _set_network(handle: IO[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter another network namespace")
