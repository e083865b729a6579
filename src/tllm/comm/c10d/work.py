"""`CollectiveWork`: the `Work` object that `torch.distributed` returns for a collective, with its future."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work as TorchWork

from tllm.comm.collectives.worker_thread import Handle
from tllm.core.errors import LinkError

FOREVER = timedelta(0)
"""How torch says that there is no other deadline than the group's own."""


class CollectiveWork(TorchWork):
    """A collective on `tensors`, under way or done; `what` it is stands in every error of it."""

    def __init__(self, handle: Handle[Any], what: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._handle, self._what, self._tensors = handle, what, list(tensors)

    def is_completed(self) -> bool:
        return self._handle.done

    def is_success(self) -> bool:
        return self._handle.done and self._handle.error is None

    def exception(self) -> BaseException | None:
        return self._handle.error if self._handle.done else None

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """True when it is done; raises what it failed with, LinkTimeout after `timeout`."""
        with errors_named(self._what):
            self._handle.wait(timeout.total_seconds() or None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future with the tensors as its value; completed in the thread that carried the work out."""
        ended: torch.futures.Future[None] = torch.futures.Future()
        self._handle.add_done_callback(lambda: ended.set_result(None))
        return ended.then(lambda _: self.result() if self.wait() else [])  # only `then` can make it fail for C++ too


def run_now(work: Callable[[], object], what: str, tensors: Sequence[torch.Tensor]) -> CollectiveWork:
    """Carry it out in the caller's thread, and return its finished `CollectiveWork`; raises what it fails with."""
    future: Future[object] = Future()
    with errors_named(what):
        future.set_result(work())
    return CollectiveWork(Handle(future, what), what, tensors)


@contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Put `what` in front of the message of a LinkError."""
    try:
        yield
    except LinkError as error:
        raise type(error)(f"{what}: {error.message}", error.hint) from error
