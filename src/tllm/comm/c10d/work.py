"""`CollectiveWork`: what `torch.distributed` gives for a collective under way, and torch's future of it."""

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

FOREVER = timedelta(0)  # how torch says that there is no other deadline than the group's own


class CollectiveWork(TorchWork):
    """A collective that works on `tensors`; `what` it is stands in every error of it."""

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
        with named(self._what):
            self._handle.wait(timeout.total_seconds() or None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Done with the work, in the thread that carried it out; its value are the tensors."""
        ended: torch.futures.Future[None] = torch.futures.Future()
        self._handle.add_done_callback(lambda: ended.set_result(None))
        return ended.then(lambda _: self.result() if self.wait() else [])  # only `then` can make it fail for C++ too


def done(work: Callable[[], object], what: str, tensors: Sequence[torch.Tensor]) -> CollectiveWork:
    """Carry it out here and now, and give the work of it; raises what it fails with."""
    future: Future[object] = Future()
    with named(what):
        future.set_result(work())
    return CollectiveWork(Handle(future, what), what, tensors)


@contextmanager
def named(what: str) -> Iterator[None]:
    """Let the errors of links say in what they happened."""
    try:
        yield
    except LinkError as error:
        raise type(error)(f"{what}: {error.message}", error.hint) from error
