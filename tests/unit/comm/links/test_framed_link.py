"""`FramedLink` over ends that tests make up: who may send when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from tllm.comm.links import frame
from tllm.comm.links.framed_link import FramedLink
from tllm.comm.links.send_buffer import Buffer, PendingSend
from tllm.core.errors import FrameError
from tllm.core.timing import AwakeClock


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

    authentic = is_over = False

    def __init__(self) -> None:
        self.clock = AwakeClock()

    def read(self, memory: memoryview, least: int, until: float, pending_sends: Sequence[PendingSend] = ()) -> int:
        raise TimeoutError

    def wait(self, seconds: float) -> bool:
        return False

    def close(self) -> None: ...


class Arrived(Silent):
    """All of `content` has come, in pieces of so many bytes, as records of TLS are; nothing comes after it."""

    def __init__(self, content: bytes, piece: int) -> None:
        super().__init__()
        self.pieces = deque(content[start : start + piece] for start in range(0, len(content), piece))
        self.reads = 0

    def read(self, memory: memoryview, least: int, until: float, pending_sends: Sequence[PendingSend] = ()) -> int:
        self.reads += 1
        start = 0
        while start < least:
            if not self.pieces:
                raise TimeoutError
            piece = self.pieces.popleft()
            count = min(len(piece), len(memory) - start)
            memory[start : start + count] = piece[:count]
            if count < len(piece):
                self.pieces.appendleft(piece[count:])
            start += count
        return start


def test_what_has_come_may_be_answered_by_another_thread_before_its_sender_goes_on() -> None:
    outgoing = Outgoing()
    link = FramedLink(outgoing, Silent(), 0, 1, 3, 1.0)
    outgoing.then = lambda: link.send(torch.ones(2))
    link.send(torch.ones(1))
    outgoing.then = lambda: link.send_bytes(b"and")
    link.send_bytes(b"so on")
    numbers = [frame.parse(bytearray(one[: frame.HEADER_SIZE])).sequence for one in outgoing.frames]
    assert numbers == [0, 1, 2, 3]


@pytest.mark.parametrize("piece", [77, 16384, 1 << 22])
@pytest.mark.parametrize("numel", [0, 1, 1024, 2048, 2049, 200_000])
def test_a_tensor_comes_as_it_was_sent_in_whatever_pieces_it_is_read(numel: int, piece: int) -> None:
    outgoing = Outgoing()
    sent = [torch.arange(numel, dtype=torch.float64) + number for number in range(2)]
    source = FramedLink(outgoing, Silent(), 0, 1, 3, 1.0)
    for x in sent:
        source.send(x)
    target = FramedLink(Outgoing(), Arrived(b"".join(outgoing.frames), piece), 0, 1, 3, 1.0)
    for x in sent:
        assert torch.equal(target.recv((numel,), torch.float64), x)
    assert source.bytes_moved == target.bytes_moved == 16 * numel


def test_a_short_tensor_is_read_together_with_its_header() -> None:
    outgoing = Outgoing()
    FramedLink(outgoing, Silent(), 0, 1, 3, 1.0).send(torch.ones(1024, dtype=torch.float64))
    arrived = Arrived(outgoing.frames[0], 16384)
    FramedLink(Outgoing(), arrived, 0, 1, 3, 1.0).recv((1024,), torch.float64)
    assert arrived.reads == 1


def test_a_frame_of_another_length_is_refused_without_waiting_for_more() -> None:
    outgoing = Outgoing()
    FramedLink(outgoing, Silent(), 0, 1, 3, 1.0).send(torch.ones(3))
    link = FramedLink(Outgoing(), Arrived(outgoing.frames[0], 16384), 0, 1, 3, 1.0)
    out = torch.zeros(1024)
    with pytest.raises(FrameError, match="rank 0 sent rank 1"):
        link.recv((1024,), torch.float32, out)
    assert not out.any(), "nothing of it is taken"
