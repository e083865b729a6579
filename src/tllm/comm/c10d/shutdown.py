"""A program that ends without `destroy_process_group`: its groups end before Python takes its threads down.

Python ends a daemon thread where that next asks for its lock. Where it does so on the way out of a torch operation, C++
cannot unwind through it and the whole process is aborted ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class OpenGroup(Protocol):
    """Something with threads of its own."""

    def shutdown(self) -> None:
        """Let what was sent leave, wake whoever waits and end; once more does nothing."""


_open: weakref.WeakSet[OpenGroup] = weakref.WeakSet()


def end_with_program(group: OpenGroup) -> None:
    """Shut it down when this process ends, should it be open then."""
    _open.add(group)


@atexit.register
def _end() -> None:
    for group in list(_open):
        group.shutdown()


os.register_at_fork(after_in_child=_open.clear)  # the child's sockets are its parent's, which goes on with them
