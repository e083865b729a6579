"""`RemoteAnswerer`: a thread that puts a queue's questions to a program elsewhere, and reconnects when it is lost."""

from __future__ import annotations

import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from tllm.core.errors import AuthError, ClusterError, ConfigError, FrameError, LinkError, TllmError
from tllm.core.timing import AwakeClock
from tllm.training.questions.answerer_places import AnswererPlace
from tllm.training.questions.question_queue import Asked, QuestionQueue
from tllm.training.questions.run_connection import Conversation, RunConnection
from tllm.training.questions.stop_signal import STOPPED, StopSignal
from tllm.training.questions.waiting_ranks import Still, nobody

RETRY_SECONDS = 0.5

LOOK_SECONDS = 0.5
"""Between two looks whether anybody can be reached, and whether the run is stopped."""

NOTICE_SECONDS = 5.0
"""After which there is a notice of whom a run waits for; then after twice as long, and so on."""

LOST_SECONDS = 500.0
"""How long the run waits, while it runs itself, where nobody can be reached and nobody reads any more of the model that
it is to answer with."""

NOBODY = "(no node has the role now)"
"""In the place of their names."""

log = logging.getLogger("tllm.train")

Intro = TypeVar("Intro")
Q = TypeVar("Q")
A = TypeVar("A")


class AnsweringThread(Protocol):
    """Takes questions until the queue is over. `trouble`: why it cannot, in words; "" where it can. `bytes_read`: of
    its model, where it is to answer once it has read that."""

    @property
    def name(self) -> str: ...

    @property
    def trouble(self) -> str: ...

    @property
    def bytes_read(self) -> int: ...

    def close(self) -> None: ...


class Inquirer(Protocol[Intro, Q, A]):
    """What a run has to say to each of its answerers. `in_flight`: questions that one has and has not answered."""

    @property
    def conversation(self) -> Conversation[Intro, Q, A]: ...

    @property
    def introduction(self) -> Intro: ...

    @property
    def in_flight(self) -> int: ...

    def send(self, connection: RunConnection[Intro, Q, A], question: Q, name: str) -> int:
        """Send a question, and before it whatever it needs; the bytes that the question took."""

    def checked(self, answer: A, question: Q, name: str) -> A:
        """The answer, if it is one to what was asked; ClusterError otherwise."""

    def refused(self, model: str, name: str, reason: str) -> ConfigError:
        """The error of a run that an answerer does not serve."""


class RemoteAnswerer(Generic[Intro, Q, A]):
    """An `AnsweringThread`. What a lost answerer was asked goes back to the queue, where it is the next that any
    other takes. Messages call it by its `name`."""

    bytes_read = 0

    def __init__(
        self,
        place: AnswererPlace,
        context: ssl.SSLContext,
        inquirer: Inquirer[Intro, Q, A],
        queue: QuestionQueue[Q, A],
    ) -> None:
        self.name, self.trouble = place.name, "not reached yet"
        self._place, self._context, self._inquirer, self._queue = place, context, inquirer, queue
        self._whom = inquirer.conversation.answerer
        self._connection: RunConnection[Intro, Q, A] | None = None
        self._is_retired = False
        self._thread = threading.Thread(target=self._run, name=f"tllm {self._whom} {self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def retire(self) -> None:
        """Ask no more, and dial no more: the thread ends soon, and others get what this one was asked."""
        self._is_retired = True
        if (connection := self._connection) is not None:
            connection.close()
        self._queue.wake()

    def close(self) -> None:
        """Once the queue is over."""
        if (connection := self._connection) is not None:
            connection.close()
        self._thread.join()

    @property
    def _is_over(self) -> bool:
        return self._is_retired or self._queue.is_over

    def _run(self) -> None:
        while not self._is_over:
            try:
                connection = RunConnection.dial(self._inquirer.conversation, self._place, self._context)
            except LinkError as error:
                self.trouble = error.message
            except AuthError as error:
                self._queue.fail(error)
            else:
                self._connection = connection
                self._ask_until_lost(connection)
            if not self._is_over:
                self._queue.pause(RETRY_SECONDS)

    def _ask_until_lost(self, connection: RunConnection[Intro, Q, A]) -> None:
        try:
            self._ask(connection)
        except FrameError as error:  # not what an answerer of this release says: dialling again would not help
            self._queue.fail(ClusterError(f"the {self._whom} at {self.name}: {error.message}"))
        except LinkError:
            self.trouble = "the connection ended"
            if not self._is_over:
                log.warning("the %s at %s is lost; what it was asked is asked again", self._whom, self.name)
        except (ConfigError, ClusterError) as error:
            self._queue.fail(error)
        except MemoryError:  # nobody else would ask in the place of this thread, and the run would wait for ever
            self._queue.fail(ClusterError(f"there is no memory for what goes to the {self._whom} at {self.name}"))
        finally:
            connection.close()

    def _ask(self, connection: RunConnection[Intro, Q, A]) -> None:
        if self._is_over:  # since it was dialled: nobody saw this connection to close it
            return
        inquirer = self._inquirer
        greeting = connection.introduce(inquirer.introduction, self._is_reached)
        if greeting.refused:
            raise inquirer.refused(greeting.model, self.name, greeting.refused)
        log.info("the %s at %s is %s", self._whom, self.name, greeting.model)
        self._is_reached()
        asked: deque[Asked[Q, A]] = deque()
        sent: deque[int] = deque()
        try:
            while True:
                while len(asked) < inquirer.in_flight and (one := self._take(wait=not asked)) is not None:
                    asked.append(one)
                    sent.append(inquirer.send(connection, one.question, self.name))
                if not asked:
                    return
                answer, received = connection.receive_answer()
                self._queue.answer(asked[0], inquirer.checked(answer, asked[0].question, self.name), received + sent[0])
                asked.popleft()
                sent.popleft()
        finally:
            self._queue.give_back(asked)

    def _is_reached(self) -> None:
        self.trouble = ""

    def _take(self, wait: bool) -> Asked[Q, A] | None:
        return self._queue.take(wait, unless=lambda: self._is_retired)


def wait_for(
    asked: Asked[Any, A],
    threads: Iterable[AnsweringThread],
    step: str,
    waits_for: Callable[[], str],
    on_wait: Callable[[str], object],
    stop: StopSignal,
    still: Still = nobody,
) -> tuple[A, int]:
    """The answer and the bytes that it took; `on_wait` hears now and then for whom `step` waits.

    ConfigError, by which every rank saves the steps before, where there is no answer. So while none of the `threads`
    can reach anybody: with the words of `STOPPED` once the run is stopped, and LOST_SECONDS after any of them read more
    of its model.
    """
    clock = AwakeClock(LOOK_SECONDS)
    reached = told = clock()
    notice, read = NOTICE_SECONDS, dict[str, int]()
    while True:
        still()
        try:
            return asked.answered.result(timeout=LOOK_SECONDS)
        except TllmError as error:
            raise ConfigError(error.message, error.hint) from error
        except TimeoutError:
            now, here, before = clock(), list(threads), read
            read = {one.name: one.bytes_read for one in here}
            is_reached = any(not one.trouble for one in here)
            if stop.is_set() and not is_reached:
                raise ConfigError(*STOPPED) from None
            if is_reached or any(count > before.get(name, 0) for name, count in read.items()):
                reached = now
            if now - reached > LOST_SECONDS:
                what = "none could be reached, or read any further," if any(read.values()) else "none could be reached"
                raise ConfigError(
                    f"{step} waits for {waits_for()}; {what} for {now - reached:.0f} s",
                    "start them again: the run goes on from its last save",
                ) from None
            if now - told >= notice:
                told, notice = now, 2 * notice
                on_wait(waits_for())
