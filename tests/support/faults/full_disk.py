"""`no_room`: a process that can write no byte of any file, as if all of its disks were full."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """While the block runs, every write to a file of this process is refused. Pipes and sockets are none."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
