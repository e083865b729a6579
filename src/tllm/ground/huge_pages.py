"""Huge pages for what is computed in: the C library asks for them only if its environment says so as a process begins.

One page of 2 MiB comes with one fault where 512 of 4 KiB would come one by one, so that memory may go back to the
system and come again (docs/log.md). Nothing is to be done where the system gives them to everybody, or to nobody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ON_REQUEST = "[madvise]"
VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def asking(environment: Mapping[str, str], policy: Path = POLICY) -> dict[str, str]:
    """The environment of a process that asks for them. What the user has said of them stays."""
    found = dict(environment)
    given = found.get(VARIABLE, "")
    if TUNABLE not in given and _on_request(policy):
        found[VARIABLE] = ":".join(filter(None, (given, f"{TUNABLE}=1")))
    return found


def begin_anew_asking(policy: Path = POLICY) -> None:
    """This program from its start, in the same process, unless it asks for them or cannot have them."""
    environment = asking(os.environ, policy)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _on_request(policy: Path) -> bool:
    try:
        return ON_REQUEST in policy.read_text()
    except OSError:
        return False
