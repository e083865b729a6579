"""`WorkerThread`: one thread that runs what it is given, in order; and `Handle`, by which to wait for a result.

Collectives that run beside their caller use both, and so do the sends and receives of the `torch.distributed` backend.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from tllm.core.errors import LinkClosed, LinkTimeout

T = TypeVar("T")


class Handle(Generic[T]):
    """A collective or a point-to-point message under way; `what` it is stands in its errors."""

    def __init__(self, future: Future[T], what: str) -> None:
        self._future, self._what = future, what

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What it failed with, once it has ended."""
        return LinkClosed(f"{self._what} had not begun") if self._future.cancelled() else self._future.exception()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call when it has ended, well or not, in the worker's thread; at once if it has ended already."""
        self._future.add_done_callback(lambda _: callback())

    def wait(self, seconds: float | None = None) -> T:
        """Its result; raises what it failed with. LinkTimeout after `seconds`, while it goes on."""
        try:
            return self._future.result(seconds)
        except TimeoutError as error:
            raise LinkTimeout(f"{self._what} is not done within {seconds:g} s", "it goes on: wait again") from error
        except CancelledError as error:
            raise LinkClosed(f"{self._what} had not begun when the group was closed") from error


class WorkerThread:
    """An executor of one daemon thread, which starts with the first work.

    Not Python's own ThreadPoolExecutor: at its end Python waits for the threads of those, and one that hangs on a link
    would keep the process from ending until a deadline.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._giving = threading.Lock()  # nothing is given once it is closed
        self._closed = False

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this worker's thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` after all that was submitted before; the future gets its result or its error.

        After `close` the future is cancelled at once.
        """
        future: Future[T] = Future()
        with self._giving:
            if self._closed:
                _cancel(future)
                return future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._waiting.put((future, work))
        return future

    def close(self) -> None:
        """Cancel the work that has not begun, and join the thread. The owner sees to it that the running work ends."""
        with self._giving:
            self._closed = True
        with contextlib.suppress(Empty):  # the thread takes from it too
            while True:
                task = self._waiting.get_nowait()
                if task is not None:
                    _cancel(task[0])
        self._waiting.put(None)
        if self._thread is not None and not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            future, work = task
            if future.set_running_or_notify_cancel():
                with _ErrorToFuture(future):
                    future.set_result(work())


def _cancel(future: Future[Any]) -> None:
    """Cancel, and say so: `concurrent.futures.wait` goes on waiting for a future that is only cancelled."""
    future.cancel()
    future.set_running_or_notify_cancel()


class _ErrorToFuture:
    """Hands an error of any class to the future, whose owner raises it."""

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
