"""`host_step`: what is done to a tensor between kernels, such as a sum over ranks, so that a recording does it too.

Whoever records takes these steps, and makes them again between its kernel calls. Whoever times what lies between them
leaves them out: a rank that measures for itself has nobody to add its part to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Step = Callable[[Tensor], Tensor]
"""Changes a tensor where it lies, and gives it back."""

Taker = Callable[[Step, Tensor], Tensor]
"""Is given a step and its tensor in the step's place."""


class _OfThread(threading.local):
    taker: Taker | None = None


_of_thread = _OfThread()


def host_step(step: Step, x: Tensor) -> Tensor:
    """step(x), or what this thread's taker makes of it."""
    taker = _of_thread.taker
    return step(x) if taker is None else taker(step, x)


@contextmanager
def taken_by(taker: Taker | None) -> Iterator[None]:
    """This thread's steps go to `taker` in the `with` block; with None they are made."""
    before, _of_thread.taker = _of_thread.taker, taker
    try:
        yield
    finally:
        _of_thread.taker = before


def left_out(step: Step, x: Tensor) -> Tensor:
    """The taker of those who want no step to be made."""
    return x
