"""`RankThread`: one rank of an engine in this process, which makes its stage and runs it in one thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

from tllm.engine.stage import Stage

Work = Callable[[], None]


class RankThread(threading.Thread):
    """Makes a stage, `made`, then waits for the work that `begin` gives it.

    The weights are loaded here too: torch's helper threads belong to the thread that first wants them, and with a
    second set on the same cores both sets sleep between products instead of spinning (a third of decoding speed).
    """

    def __init__(self, rank: int, make: Callable[[], Stage]) -> None:
        super().__init__(name=f"tllm-rank-{rank}", daemon=True)
        self.made: Future[Stage] = Future()
        self._make = make
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()

    def begin(self, work: Work | None) -> None:
        """Run the stage by `work`, or end without (None)."""
        self._work.put(work)

    def run(self) -> None:
        """The thread: what goes wrong in making is carried by `made`."""
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: self._fail(error))
            self.made.set_result(self._make())
        work = self._work.get()
        if work is not None:
            work()

    def _fail(self, error: BaseException | None) -> bool:
        if error is not None:
            self.made.set_exception(error)
        return True
