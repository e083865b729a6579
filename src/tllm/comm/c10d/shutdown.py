"""Shuts down the groups of a program that ends without `destroy_process_group`, before Python ends its threads.

At its end Python stops a daemon thread when that next asks for the interpreter's lock. If the thread is then returning
from a torch operation, C++ cannot unwind through it, and the process aborts ("terminate called without an active
exception").
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class OpenGroup(Protocol):
    """A group with threads of its own."""

    def shutdown(self) -> None:
        """Let what was sent leave, wake whoever waits and end; a second call does nothing."""


_open: weakref.WeakSet[OpenGroup] = weakref.WeakSet()


def end_with_program(group: OpenGroup) -> None:
    """Shut the group down when this process ends, if it is still open then."""
    _open.add(group)


@atexit.register
def _end() -> None:
    for group in list(_open):
        group.shutdown()


os.register_at_fork(after_in_child=_open.clear)  # the child's sockets are its parent's, which goes on with them
