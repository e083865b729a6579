"""Waiting in a thread for what another comes to, so that an interrupt (Ctrl-C) is heard."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

SECONDS = 1.0
"""After which a wait begins anew: a signal just before one, or to another thread, is heard only when that ends."""


def result_of(future: Future[T]) -> T:
    """What the future comes to; raises what it raises."""
    while True:
        try:
            return future.result(SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()  # or the error was its own
