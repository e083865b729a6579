"""`DeviceChannel`: messages between the devices of one machine's ranks, from device memory to device memory.

A kernel of NCCL waits on the device for the other end, and nothing can be said of it until it ends: not who is late,
not that a rank died, nor that the two ends disagree on a length. Two threads of a rank that use two channels could even
wait for each other: some calls of CUDA wait for all that runs on the device (where memory is freed, or a kernel is
loaded), and while one waits for a message of the first thread, the second's is not started. So ranks first meet on the
host (`ArrivalBoard`), and a message is started when both of its ends are there. Then it takes no longer than its bytes.

Who waits here also watches the links of the same ranks, on which the end of a process shows at once. After any error
the channel is aborted, so that neither a thread nor a kernel is left waiting.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from tllm.comm.links.errors import refused_link, source_gone
from tllm.comm.links.frame import dtype_name
from tllm.comm.links.link import Link
from tllm.comm.nccl.arrivals import ArrivalBoard
from tllm.comm.nccl.device_backend import DeviceProcessGroup
from tllm.core.errors import LinkClosed, LinkError, LinkTimeout

SPIN_SECONDS = 0.0005
"""So long a wait is a loop; a longer one sleeps in between."""

PAUSE_SECONDS = 0.0001
"""From one look to the next then: who is late has work to do, perhaps on this very core."""

LOOK_SECONDS = 0.02
"""How often who waits looks whether the other ranks are there still."""

PARTING_SECONDS = 1.0
"""How long messages of a rank that has gone away may still take to arrive, and its link to show that it has."""

FAREWELL_SECONDS = 2.0
"""How long a rank that is done waits for the others to be, before it takes away the memory that they read."""

FAREWELL = 0
"""The signature of a rank that is done."""

TAG = 0


class DeviceChannel:
    """One rank's end; ranks have their places on the machine as numbers. One thread at a time may use it.

    `links` come from each other rank, and name it in errors. `deadline`: seconds that an exchange may take.
    """

    def __init__(
        self,
        process_group: DeviceProcessGroup,
        board: ArrivalBoard,
        links: Mapping[int, Link],
        deadline: float,
    ) -> None:
        self.links, self.deadline = links, deadline
        self._process_group: DeviceProcessGroup | None = process_group
        self._board = board

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Send one contiguous tensor to each of some ranks and receive one from each of some, all at once.

        `meanwhile` is called while they travel. Returns when all is there. Each rank must call it for the same pairs
        in the same order. FrameError where two ends do not name the same dtypes and lengths.
        """
        with self._aborted_by_errors():
            self._meet(sends, recvs)
            wait = self._start(sends, recvs)
            meanwhile()
            wait()

    def close(self) -> None:
        """Give back what the channel takes on the device, once the other ranks have all that this one sent."""
        if self._process_group is not None:
            for peer in self.links:
                self._board.come(peer, FAREWELL)
            until = time.monotonic() + FAREWELL_SECONDS
            while time.monotonic() < until and any(
                not self._board.has_come(peer) and not link.is_over for peer, link in self.links.items()
            ):
                time.sleep(PAUSE_SECONDS)
        self.abort()

    def abort(self) -> None:
        """End whatever is under way, and the channel."""
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            with contextlib.suppress(RuntimeError):  # of a group that has failed; there is nothing left to save
                process_group.abort()

    def _meet(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> None:
        """Return when each of the other ranks has come to this exchange too."""
        goes = {peer: self._goes(peer, sends, recvs) for peer in {**sends, **recvs}}
        for peer, words in goes.items():
            self._board.come(peer, _signature(words))
        self._wait_until(lambda: all(map(self._board.has_come, goes)), goes, partial(self._late, goes))
        for peer, words in goes.items():
            told, link = self._board.signature(peer), self.links[peer]
            if told == FAREWELL:
                raise source_gone(link.source, link.target, "messages between devices", "it has closed them")
            if told != _signature(words):
                expected = f"{words[0]} to the higher rank and {words[1]} back"
                raise refused_link(link.source, link.target, "tensors of another plan", expected)

    def _goes(self, peer: int, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> tuple[str, str]:
        """What goes to the higher of two ranks and what to the lower one, in the same words at both ends."""
        there, back = _words(sends.get(peer)), _words(recvs.get(peer))
        link = self.links[peer]
        return (there, back) if link.source > link.target else (back, there)

    def _start(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> Callable[[], None]:
        """Start the messages; what is returned waits for them. Tensors without elements take none."""
        group = self._process_group
        if group is None:
            raise _closed()
        filled = {peer: x for peer, x in recvs.items() if x.numel()}
        places = {peer: x if x.is_contiguous() else torch.empty_like(x).contiguous() for peer, x in filled.items()}
        leaving = {peer: x for peer, x in sends.items() if x.numel()}
        if not places and not leaving:
            return lambda: None
        group._start_coalescing()
        for peer, x in leaving.items():
            group.send([_bytes(x)], peer, TAG)
        for peer, x in places.items():
            group.recv([_bytes(x)], peer, TAG)
        under_way = group._end_coalescing()

        def wait() -> None:
            peers = {**leaving, **places}
            self._wait_until(under_way.is_completed, peers, partial(self._unfinished, peers), PARTING_SECONDS)
            under_way.wait()
            if self._process_group is not group:  # aborted by another thread, which ends messages without their bytes
                raise _closed()
            for peer, x in filled.items():
                if places[peer] is not x:
                    x.copy_(places[peer])

        return wait

    def _wait_until(
        self,
        done: Callable[[], bool],
        peers: Iterable[int],
        late: Callable[[], LinkTimeout],
        parting_seconds: float = 0.0,
    ) -> None:
        """Raises what is `late` after the deadline, and the loss of one of `peers` `parting_seconds` after it shows.

        Other ranks may leave: those that have no part in an exchange may be done.
        """
        began = time.monotonic()
        look, gone_since = began + LOOK_SECONDS, math.inf
        while not done():
            now = time.monotonic()
            if self._process_group is None:  # another thread has closed the channel
                raise _closed()
            if now > look:
                look = now + LOOK_SECONDS
                if gone := self._gone(peers):
                    gone_since = min(gone_since, now)
                    if now >= gone_since + parting_seconds:
                        raise gone
                if now - began > self.deadline:
                    raise late()
            time.sleep(0.0 if now - began < SPIN_SECONDS else PAUSE_SECONDS)

    def _gone(self, peers: Iterable[int]) -> LinkClosed | None:
        """What is to be said of the first of these ranks that has gone away."""
        for link in (self.links[peer] for peer in peers):
            if link.is_over:
                return source_gone(link.source, link.target, "messages between devices", "its link is closed")
        return None

    def _late(self, peers: Iterable[int]) -> LinkTimeout:
        link = next(
            (self.links[peer] for peer in peers if not self._board.has_come(peer)), self.links[next(iter(peers))]
        )
        return LinkTimeout(
            f"rank {link.source} did not come to exchange tensors with rank {link.target} between their devices "
            f"within {self.deadline:g} s",
            f"see whether rank {link.source} runs; slow work needs a longer deadline",
        )

    def _messages(self, peers: Iterable[int]) -> str:
        """Those with these ranks, in words."""
        links = [self.links[peer] for peer in peers]
        others = ", ".join(str(link.source) for link in links)
        return f"messages between the devices of rank {links[0].target} and of {others}"

    def _unfinished(self, peers: Iterable[int]) -> LinkTimeout:
        return LinkTimeout(
            f"{self._messages(peers)} were not done within {self.deadline:g} s",
            "see whether these ranks run, and their devices",
        )

    @contextlib.contextmanager
    def _aborted_by_errors(self) -> Iterator[None]:
        try:
            yield
        except LinkError:
            self.abort()
            raise
        except RuntimeError as error:  # torch has no other kind for what fails in NCCL
            failure = self._failure(error)
            self.abort()
            raise failure from error

    def _failure(self, error: RuntimeError) -> LinkError:
        """The rank that went away, if one did, else what the backend says."""
        until = time.monotonic() + PARTING_SECONDS
        while time.monotonic() < until:
            if gone := self._gone(self.links):
                return gone
            time.sleep(LOOK_SECONDS)
        return LinkClosed(
            f"{self._messages(self.links)} failed: {str(error).splitlines()[0]}",
            "NCCL_DEBUG=INFO says more; without --intra-host nccl they go by links",
        )


def _bytes(x: Tensor) -> Tensor:
    """A contiguous tensor's bytes, as every backend can move them."""
    return x.detach().view(-1).view(torch.uint8)


def _words(x: Tensor | None) -> str:
    return "nothing" if x is None else f"{x.numel()} of {dtype_name(x.dtype)}"


def _signature(goes: tuple[str, str]) -> int:
    return zlib.crc32("|".join(goes).encode())


def _closed() -> LinkClosed:
    return LinkClosed("the channel between the devices of this machine is closed")
