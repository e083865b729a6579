"""`Link`: one directed point-to-point connection between two ranks, for tensors and bytes; `LocalLink` in one process.

The links between processes are `TcpLink` (`tcp_link.py`) and `TransportLink` (`transport_link.py`).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from tllm.comm.links import errors as faults
from tllm.comm.links import frame
from tllm.comm.links.send_buffer import PendingSend
from tllm.core.errors import FrameError, LinkError
from tllm.core.timing import wait_awake

DEADLINE = 30.0
"""Seconds that a send or a receive may take, unless `set_deadline` says otherwise."""

LOCAL_DEPTH = 64
"""Messages that may wait in a LocalLink, unless it is unbounded."""


class Link(Protocol):
    """A directed wire: the process of rank `source` calls the methods that send, that of `target` those that receive.

    Every error is a LinkError that names both ranks: LinkTimeout after the deadline, LinkClosed when the other end went
    away, FrameError for what the plan does not expect. After an error the link is closed for good, because nobody knows
    what the next bytes mean.
    """

    source: int
    target: int
    bytes_moved: int  # of payload, by this end

    def send(self, tensor: torch.Tensor) -> None:
        """Send; the caller may overwrite `tensor` afterwards."""

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
        pending_sends: Sequence[PendingSend] = (),
    ) -> torch.Tensor:
        """Receive exactly this shape and dtype, into `out` when given; FrameError for anything else.

        While it waits it pushes `pending_sends`, which other links of this rank have returned from `start_send`.
        """

    def start_send(self, tensor: torch.Tensor) -> PendingSend | None:
        """Send without copying and without waiting.

        What does not leave now is returned, for the caller to push; `tensor` must stay as it is until that is done.
        None if nothing is left.
        """

    def send_bytes(self, payload: bytes) -> None: ...

    def recv_bytes(self, limit: int) -> bytes:
        """Receive at most `limit` bytes; FrameError for more, before any memory is taken."""

    def wait(self, seconds: float) -> bool:
        """Whether something to receive, or the end of the link, is there within `seconds`."""

    @property
    def is_over(self) -> bool:
        """Whether an end has closed the link, or died. What arrived before may still be received."""

    def set_deadline(self, seconds: float) -> None:
        """Seconds that each send or receive may take; `math.inf` waits for ever."""

    def unbounded(self) -> None:
        """Lift the back-pressure: from now on a send never waits for the other end to receive.

        For callers that bound what is under way in another way, as a pipeline schedule does.
        """

    def interrupt(self) -> None:
        """From another thread: end the link at once, whatever is under way. Whoever waits gets a LinkError."""

    def close(self) -> None:
        """Let what was sent leave, then end the link. Called from another thread, it ends a receive that waits."""


def break_off(links: Collection[Link]) -> None:
    """Interrupt and close links on which nothing that is under way matters any more, nor an error that comes of it."""
    for link in links:
        link.interrupt()
    for link in links:
        with contextlib.suppress(LinkError):
            link.close()


class LocalLink:
    """A link between two threads of one process, which both hold this one object; each message is copied once."""

    def __init__(self, source: int, target: int, deadline: float = DEADLINE) -> None:
        self.source, self.target = source, target
        self.bytes_moved = 0
        self._deadline = deadline
        self._changed = threading.Condition()
        self._depth: float = LOCAL_DEPTH
        self._waiting: deque[torch.Tensor | bytes] = deque()
        self._closed = False

    def send(self, tensor: torch.Tensor) -> None:
        frame.tensor_prefix(tensor.shape, tensor.dtype, 0)  # refuse here what no other link could carry
        self._put(tensor.detach().clone(memory_format=torch.contiguous_format), tensor.nbytes)

    def start_send(self, tensor: torch.Tensor) -> None:
        self.send(tensor)

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
        pending_sends: Sequence[PendingSend] = (),
    ) -> torch.Tensor:
        what = f"{frame.dtype_name(dtype)} {tuple(shape)}"
        message = self._take(what)
        if isinstance(message, bytes) or message.shape != tuple(shape) or message.dtype != dtype:
            raise self._refused(message, what)
        return message if out is None else out.copy_(message)

    def send_bytes(self, payload: bytes) -> None:
        self._put(bytes(payload), len(payload))

    def recv_bytes(self, limit: int) -> bytes:
        message = self._take(f"up to {limit} bytes")
        if not isinstance(message, bytes) or len(message) > limit:
            raise self._refused(message, f"up to {limit} bytes")
        return message

    def wait(self, seconds: float) -> bool:
        with self._changed:
            return self._wait(lambda: bool(self._waiting), seconds)

    @property
    def is_over(self) -> bool:
        return self._closed

    def set_deadline(self, seconds: float) -> None:
        self._deadline = seconds

    def unbounded(self) -> None:
        self._depth = math.inf

    def interrupt(self) -> None:
        self.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, message: torch.Tensor | bytes, size: int) -> None:
        with self._changed:
            if not self._wait(lambda: len(self._waiting) < self._depth, self._deadline):
                self.close()
                raise faults.nothing_taken(self.source, self.target, self._deadline)
            if self._closed:
                raise faults.target_gone(self.source, self.target, "closed")
            self._waiting.append(message)
            self.bytes_moved += size
            self._changed.notify_all()

    def _take(self, what: str) -> torch.Tensor | bytes:
        with self._changed:
            if not self._wait(lambda: bool(self._waiting), self._deadline):
                self.close()
                raise faults.nothing_sent(self.source, self.target, self._deadline, what)
            if not self._waiting:
                raise faults.source_gone(self.source, self.target, what, "closed")
            self._changed.notify_all()
            return self._waiting.popleft()

    def _wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        return wait_awake(self._changed, lambda: ready() or self._closed, seconds)

    def _refused(self, message: torch.Tensor | bytes, expected: str) -> FrameError:
        self.close()
        if isinstance(message, bytes):
            got = f"{len(message)} bytes"
        else:
            got = f"{frame.dtype_name(message.dtype)} {tuple(message.shape)}"
        return faults.refused_link(self.source, self.target, got, expected)
