"""`AnswererPlaces`: the addresses of programs that answer a run's questions, by role. They come and go during a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tllm.core.memory import amount


class AnswererPlace(NamedTuple):
    """`name` is what messages call it, `address` its host and port. `node` is whose certificate it shows, where that is
    known, and `run` what it is told of who asks."""

    name: str
    address: tuple[str, int]
    node: str = ""
    run: str = ""


@dataclass(frozen=True)
class ReadingAnswerer:
    """A node that is to answer once it has read its model, of which it has `bytes_read` of `total` bytes."""

    name: str
    bytes_read: int
    total: int

    @property
    def trouble(self) -> str:
        return f"has read {amount(self.bytes_read)} of {amount(self.total)} of its model"

    def close(self) -> None:
        """Nothing runs here."""


class AskingRun(NamedTuple):
    """Who asks: the `node` that its certificate names, for a `run`."""

    node: str
    run: str = ""


KnownAnswerers = Sequence[AnswererPlace | ReadingAnswerer]
"""All that have a role, or take it."""

Hear = Callable[[KnownAnswerers], object]
"""hear(all of a role)"""


class AnswererPlaces:
    """The latest of each role, told by one thread and heard by one follower for each role."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, KnownAnswerers] = {}
        self._followers: dict[str, Hear] = {}

    def tell(self, role: str, places: KnownAnswerers) -> None:
        """These are all of a role now."""
        with self._lock:
            self._places[role] = places
            if (follower := self._followers.get(role)) is not None:
                follower(places)

    def forget(self) -> None:
        """Nobody follows any more."""
        with self._lock:
            self._followers.clear()

    def follow(self, role: str, follower: Hear) -> None:
        """Hear what is known of a role now, and every change from here on, in the place of who followed it before."""
        with self._lock:
            self._followers[role] = follower
            follower(self._places.get(role, ()))
