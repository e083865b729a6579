"""`Departure`: how a joined node answers signals: the first lets it leave in order, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from tllm.core.disk import print_line
from tllm.node.front_end.front_end import FrontEnd
from tllm.node.front_end.server_loop import ServerLoop
from tllm.server.http.settings import ServerSettings
from tllm.server.tracing.tracing import OpenTracing, no_tracing


class Departure:
    """Listens to SIGINT and SIGTERM from when it is made, which must be in the main thread.

    With `http` settings the node has an HTTP server (`front_end`), whose requests are traced by `open_tracing`, and
    those in hand end first. If the node coordinates a training run, the first signal is for the run: `stop_run` lets it
    save and end, and the cluster with it. With a `loop` the HTTP server goes on in that of a server before it.
    """

    def __init__(
        self,
        http: ServerSettings | None,
        stop_run: Callable[[], bool] = lambda: False,
        open_tracing: OpenTracing = no_tracing,
        loop: ServerLoop | None = None,
    ) -> None:
        self._stop_run = stop_run
        self._asked = 0
        self._is_drained = False
        self.front_end = None if http is None else FrontEnd(http, _say_ready, self._drained, open_tracing, loop)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def run(self, work: Callable[[], bool]) -> bool:
        """Do this, which signals end by a KeyboardInterrupt, and return what it does: whether the work has come to its
        end. A node that was told to leave left work that goes on, but for a server, whose own requests have ended. The
        KeyboardInterrupt is raised where a second signal was needed."""
        try:
            return work()
        except KeyboardInterrupt:
            if self._asked != 1:
                raise
            return self.front_end is not None

    def _on_signal(self, number: int, frame: object) -> None:
        if self._is_drained:  # our own
            self._is_drained = False
            raise KeyboardInterrupt
        self._asked += 1
        if self._asked == 1 and self._stop_run():
            print_line("\nsaving, then ending the run; once more leaves at once")
            return
        if self._asked > 1 or self.front_end is None:
            raise KeyboardInterrupt
        self.front_end.leave()

    def _drained(self) -> None:
        """The HTTP server's thread has ended: wake the main thread."""
        self._is_drained = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _say_ready(model: str, url: str) -> None:
    print_line(f"serving {model} at {url}/v1")
