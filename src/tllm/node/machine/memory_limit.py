"""How much of its machine's memory a node may take: a limit that the operating system enforces, and what is said when
it is reached.

The limit is RLIMIT_DATA, which counts all private memory that can be written: weights, caches, activations and torch's
own state lie in it. It does not count file pages that the system can take back at any time (90 MB of torch's
libraries). A process with torch at rest has 200 MB of it, 30 MB more than it touches, and 8 MB for each thread's stack.
Builds that drive GPUs have 500 MB that nobody ever touches. So what a process has not touched at rest is allowed on
top, and the limit means what a plan counts.

An allocation beyond the limit fails in this process before a byte is touched, and the machine's other programs keep
their memory. RLIMIT_AS would also count what is only reserved, three times as much (all measured).
"""

from __future__ import annotations

import contextlib
import resource

import torch

from tllm.core.errors import CapacityError
from tllm.core.memory import amount, peak_bytes, rss_bytes

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
    has = f"{amount(given)} that it was given" if given is not None else "machine's memory"
    holds, most = amount(rss_bytes()), amount(peak_bytes())
    return CapacityError(f"out of memory: it holds {holds} ({most} at the most), and more did not fit the {has}", HINT)
