"""`WorkerThread`: one thread that carries out what it is given, in order, and never keeps this process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerThread:
    """A pool of one daemon thread, which begins with the first work.

    Python waits at its end for the threads of its own pools; one that hangs on a link would hold it until a deadline.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_here(self) -> bool:
        """Whether it is this lane's own thread that asks."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Carry out `work` after all that was submitted before; what it raises is the future's.

        Of a lane that is closed the future is cancelled: nobody would ever carry it out.
        """
        future: Future[T] = Future()
        if self._closed:
            future.cancel()
            return future
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._waiting.put((future, work))
        return future

    def close(self) -> None:
        """Cancel what has not begun and end the thread, once what it is at is over; the owner sees to that."""
        self._closed = True
        while not self._waiting.empty():
            task = self._waiting.get()
            if task is not None:
                task[0].cancel()
        self._waiting.put(None)
        if self._thread is not None and not self.is_here:
            self._thread.join()

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            future, work = task
            if future.set_running_or_notify_cancel():
                carry_out(work, future)


def carry_out(work: Callable[[], T], future: Future[T]) -> None:
    """Do it now, in this thread: the future gets the result or the error."""
    with _Failing(future):
        result = work()
        future.set_result(result)


class _Failing:
    """Hands an error to the future, whose owner raises it: it is not lost, whatever it is."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or self._future.done():
            return False
        self._future.set_exception(error)
        return True
