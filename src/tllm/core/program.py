"""This program: a digest of its source, and the environment in which it computes.

Libraries read the environment when a process starts. A command that computes therefore executes itself again with
what they need (`reexecute_to_compute`), and gives it to the workers that it starts. A user's own program that imports
`tllm` is not executed again: it has all but the first of these, if it has not loaded torch before (`ask_torch`).

- glibc's GLIBC_TUNABLES, for huge pages: one page of 2 MiB comes with one page fault, where 512 pages of 4 KiB come
  with one each; so returning memory to the system and getting it again costs less (docs/log/memory.md). Nothing is
  done where Linux gives huge pages to everybody, or to nobody.
- libgomp's GOMP_SPINCOUNT, for threads that wait for each other: by default one turns around for some milliseconds
  before it sleeps, and where other programs compute, too, it takes the core from the very thread that it waits for
  (docs/log/serving.md).
- torch's LRU_CACHE_CAPACITY and oneDNN's ONEDNN_PRIMITIVE_CACHE_CAPACITY: each keeps what it has prepared for products
  of 1,024 shapes by default, some 200 KB of each. A server meets other shapes with each number of tokens in a batch, so
  its memory grew for hours (docs/log/memory.md).
- OpenMP's OMP_NUM_THREADS, where control groups allow the time of fewer processors than there are, as a limit of
  Kubernetes does: torch would begin a thread for each of them, of which most are stopped while the others wait.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from tllm.core.processor import group_threads

ROOT = Path(__file__).parents[1]

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ON_REQUEST = "[madvise]"
VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"

WAITING = {"GOMP_SPINCOUNT": "1000"}
"""Turns of a waiting thread until it sleeps: some tens of microseconds, about what waking it costs."""

PREPARED = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "192")
"""Shapes of products that stay prepared: the four weights of a layer meet 36 numbers of rows each at most."""

THREADS = "OMP_NUM_THREADS"

SAYS_HOW_TO_WAIT = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}


@functools.cache
def source_digest(root: Path = ROOT) -> str:
    """SHA-256, in hex, of all Python files of the package with their names, as they are at the first call."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def computing_environment(environment: Mapping[str, str], huge_pages: Path = HUGE_PAGES) -> dict[str, str]:
    """The environment with the variables for huge pages, threads that wait, prepared products and how many threads
    there are. What the user has set stays."""
    prepared = {name: value for name, value in PREPARED.items() if name.replace("ONEDNN", "DNNL") not in environment}
    extended = prepared | dict(environment)
    given = extended.get(VARIABLE, "")
    if TUNABLE not in given and _on_request(huge_pages):
        extended[VARIABLE] = ":".join(filter(None, (given, f"{TUNABLE}=1")))
    if not SAYS_HOW_TO_WAIT & set(extended):
        extended |= WAITING
    if THREADS not in extended and (threads := group_threads()) is not None:
        extended[THREADS] = str(threads)
    return extended


def reexecute_to_compute(huge_pages: Path = HUGE_PAGES) -> None:
    """Execute this program from its start, in the same process, with `computing_environment`.

    Returns if the environment is so already. From one call to the other a Ctrl-C waits: Python would print a traceback
    for it while it starts.
    """
    environment = computing_environment(os.environ, huge_pages)
    if environment != dict(os.environ):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def ask_torch() -> None:
    """Put what torch's libraries read into the environment of this process, which is a user's own program.

    Does nothing once they are loaded, as they have read it, or where a process before this one has put it there.
    """
    if "torch" not in sys.modules:
        asked = computing_environment(os.environ)
        os.environ.update({name: asked[name] for name in (*WAITING, *PREPARED, THREADS) if name in asked})


def _on_request(huge_pages: Path) -> bool:
    try:
        return ON_REQUEST in huge_pages.read_text()
    except OSError:
        return False
