"""What a node may take of its machine's memory: a limit that the system keeps, and words for when it is reached.

The limit is RLIMIT_DATA: all private memory that can be written, which is what weights, caches, activations and torch's
own state lie in. A process with torch at rest has 200 MB of it, 30 MB more than it touches, and 8 MB for each thread's
stack; only file pages that the system can take back at any time do not count (90 MB of torch's libraries). So what it
allows is what a plan counts. An allocation beyond it fails in this process, before a byte is touched, and the machine's
other programs keep theirs. RLIMIT_AS would also count what is only reserved, three times as much (all measured).
"""

from __future__ import annotations

import contextlib
import resource

import torch

from tllm.core.errors import CapacityError
from tllm.core.memory import peak_bytes, rss_bytes

HINT = "give it more memory (--memory), a smaller part of the plan, or a smaller cache (--kv-cache-memory)"
FAILED = ("can't allocate memory", "can't start new thread", "Cannot allocate memory")


def keep_to(given: int) -> None:
    """Let this process, which computes on the processor, have no more memory from now on."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    with contextlib.suppress(ValueError):  # where less is allowed anyway
        resource.setrlimit(resource.RLIMIT_DATA, (given, hard))


def out_of_memory(error: BaseException, given: int | None) -> CapacityError | None:
    """The error in words if memory was what failed, else None."""
    if isinstance(error, torch.OutOfMemoryError):  # of a device, whose message says how much of it is held
        return CapacityError(f"out of memory: {str(error).splitlines()[0]}", HINT)
    lacks = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in FAILED))
    if not lacks:
        return None
    has = f"{given} bytes that it was given" if given is not None else "machine's memory"
    return CapacityError(
        f"out of memory: it holds {rss_bytes()} bytes ({peak_bytes()} at the most), and more did not fit the {has}",
        HINT,
    )
