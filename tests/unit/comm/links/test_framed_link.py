"""`FramedLink` over ends that tests make up: who may send when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tllm.comm.links import frame
from tllm.comm.links.framed_link import FramedLink
from tllm.comm.links.send_buffer import Buffer, PendingSend


class Outgoing:
    """Keeps what it is given; then does what the other end's answer would bring about."""

    authentic = False
    deadline = depth = 1.0

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.then: Callable[[], None] = lambda: None

    def write(self, frame: bytes) -> None:
        self.frames.append(frame)
        then, self.then = self.then, lambda: None
        then()

    def start_write(self, parts: Iterable[Buffer]) -> PendingSend | None:
        raise AssertionError("nothing long is sent")

    def close(self) -> None: ...

    def abandon(self) -> None: ...

    def interrupt(self) -> None: ...


class Silent:
    """Nothing ever comes."""

    authentic = False

    is_over = False

    def read(self, memory: object, size: int, until: float, pending_sends: Sequence[PendingSend] = ()) -> None:
        raise TimeoutError

    def wait(self, seconds: float) -> bool:
        return False

    def close(self) -> None: ...


def test_what_has_come_may_be_answered_by_another_thread_before_its_sender_goes_on() -> None:
    outgoing = Outgoing()
    link = FramedLink(outgoing, Silent(), 0, 1, 3, 1.0)
    outgoing.then = lambda: link.send(torch.ones(2))
    link.send(torch.ones(1))
    outgoing.then = lambda: link.send_bytes(b"and")
    link.send_bytes(b"so on")
    numbers = [frame.parse(bytearray(one[: frame.HEADER_SIZE])).sequence for one in outgoing.frames]
    assert numbers == [0, 1, 2, 3]
