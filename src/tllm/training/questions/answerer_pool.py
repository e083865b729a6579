"""`AnswererPool`: one thread for each program that answers a run's questions."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tllm.training.questions.answerer_places import AnswererPlace, AnswererPlaces, KnownAnswerers, ReadingAnswerer
from tllm.training.questions.question_queue import Asked, QuestionQueue
from tllm.training.questions.remote_answerer import NOBODY, Inquirer, RemoteAnswerer, wait_for
from tllm.training.questions.waiting_ranks import Still, nobody

log = logging.getLogger("tllm.train")

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
    """Those that are here now, and after them those that still read their model. They may come and go (`hear`); what
    one was asked that goes, the others get."""

    def __init__(self, inquirer: Inquirer[Intro, Q, A], queue: QuestionQueue[Q, A], context: ssl.SSLContext) -> None:
        self._inquirer, self._queue, self._context = inquirer, queue, context
        self._lock = threading.Lock()
        self._asking: dict[AnswererPlace, RemoteAnswerer[Intro, Q, A]] = {}
        self._reading: list[ReadingAnswerer] = []

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

    def __iter__(self) -> Iterator[RemoteAnswerer[Intro, Q, A] | ReadingAnswerer]:
        with self._lock:
            asking, reading = list(self._asking.values()), self._reading
        yield from asking
        yield from reading

    def __len__(self) -> int:
        return len(self._asking)

    def hear(self, known: KnownAnswerers) -> None:
        """These are all that there are now: ask those that are new, and the others no more."""
        places = [one for one in known if isinstance(one, AnswererPlace)]
        with self._lock:
            self._reading = [one for one in known if isinstance(one, ReadingAnswerer)]
            for place in self._asking.keys() - set(places):
                self._asking.pop(place).retire()
            for place in places:
                if place not in self._asking:
                    asking = RemoteAnswerer(place, self._context, self._inquirer, self._queue)
                    self._asking[place] = asking
                    asking.start()

    def answer_of(self, asked: Asked[Q, A], still: Still = nobody) -> tuple[A, int]:
        """The answer, once it is there, and the bytes that it took. ConfigError where nobody can answer."""
        return wait_for(asked, self, "the run", self.waits_for, self._tell, self._queue.stop, still)

    def waits_for(self) -> str:
        """Those that are here, with what is the matter with each."""
        each = ", ".join(f"{one.name} ({one.trouble or 'computing'})" for one in self)
        return f"the {self._inquirer.conversation.answerer}s {each or NOBODY}"

    def close(self) -> None:
        """End the threads; whoever waits for an answer gets an error."""
        self._queue.close()
        for one in self:
            one.close()

    def _tell(self, reason: str) -> None:
        if not len(self) or any(one.trouble for one in self):
            log.warning("waiting for %s", reason)
