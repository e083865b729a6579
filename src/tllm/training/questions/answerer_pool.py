"""`AnswererPool`: one thread for each program that answers a run's questions."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tllm.training.questions.answerer_places import AnswererPlace, AnswererPlaces
from tllm.training.questions.question_queue import QuestionQueue
from tllm.training.questions.remote_answerer import Inquirer, RemoteAnswerer

Intro = TypeVar("Intro")
Q = TypeVar("Q")
A = TypeVar("A")


class NamedAnswerers(NamedTuple):
    """Programs that a job names: their addresses, and whom the run and they trust."""

    addresses: Sequence[tuple[str, int]]
    context: ssl.SSLContext


@dataclass(frozen=True)
class ClusterAnswerers:
    """Nodes of the run's own cluster that answer it: how they are dialled, and where they are."""

    context: ssl.SSLContext
    places: AnswererPlaces = field(default_factory=AnswererPlaces)


class AnswererPool(Generic[Intro, Q, A]):
    """Those that are here now. They may come and go (`hear`); what one was asked that goes, the others get."""

    def __init__(self, inquirer: Inquirer[Intro, Q, A], queue: QuestionQueue[Q, A], context: ssl.SSLContext) -> None:
        self._inquirer, self._queue, self._context = inquirer, queue, context
        self._lock = threading.Lock()
        self._asking: dict[AnswererPlace, RemoteAnswerer[Intro, Q, A]] = {}

    @classmethod
    def at(
        cls,
        addresses: Sequence[tuple[str, int]],
        inquirer: Inquirer[Intro, Q, A],
        queue: QuestionQueue[Q, A],
        context: ssl.SSLContext,
    ) -> AnswererPool[Intro, Q, A]:
        """Programs that a job names, which are dialled for as long as the run lasts."""
        pool = cls(inquirer, queue, context)
        pool.hear([AnswererPlace(f"{host}:{port}", (host, port)) for host, port in addresses])
        return pool

    @classmethod
    def of(
        cls, role: str, cluster: ClusterAnswerers, inquirer: Inquirer[Intro, Q, A], queue: QuestionQueue[Q, A]
    ) -> AnswererPool[Intro, Q, A]:
        """Nodes that have a role, whoever they are at the time."""
        pool = cls(inquirer, queue, cluster.context)
        cluster.places.follow(role, pool.hear)
        return pool

    def __iter__(self) -> Iterator[RemoteAnswerer[Intro, Q, A]]:
        with self._lock:
            return iter(list(self._asking.values()))

    def __len__(self) -> int:
        return len(self._asking)

    def hear(self, places: Sequence[AnswererPlace]) -> None:
        """These are all that there are now: ask those that are new, and the others no more."""
        with self._lock:
            for place in self._asking.keys() - set(places):
                self._asking.pop(place).retire()
            for place in places:
                if place not in self._asking:
                    asking = RemoteAnswerer(place, self._context, self._inquirer, self._queue)
                    self._asking[place] = asking
                    asking.start()
