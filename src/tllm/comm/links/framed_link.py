"""`FramedLink`: a link between two processes, as frames that are numbered and checked, over any transport.

What moves the bytes is a `FrameQueue` at the source and a `ByteReceiver` at the target. `TcpLink` has those of a
socket; `TransportLink` has queues that a thread of another library empties and fills.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from tllm.comm.links import errors as faults
from tllm.comm.links import frame
from tllm.comm.links.send_buffer import FrameQueue, PendingSend
from tllm.core.errors import FrameError, LinkError

PREFIXES_KEPT = 256
"""Headers' prefixes, by shape and dtype, that one link remembers."""

JOINED_BYTES = 16 * 1024
"""A tensor of up to so many bytes is copied behind its header, which costs less than one more call of the socket."""

Expected = bytes | str
"""The expected prefix and sequence number of a header, or a description in words for errors."""


class ByteReceiver(Protocol):
    """What the target's end reads bytes from; `tcp_link.ReceiveBuffer` says what each call means.

    `authentic`: the transport has checked each byte already, as TLS does.
    """

    authentic: bool

    def read(
        self, memory: frame.Memory | bytearray, size: int, until: float, pending_sends: Sequence[PendingSend] = ()
    ) -> None: ...

    def wait(self, seconds: float) -> bool: ...

    @property
    def is_over(self) -> bool: ...

    def close(self) -> None: ...


class FramedLink:
    """One end of a link, which carries frames in one direction only; `Link` says what each call means.

    `sender` takes whole frames at the source, `receiver` gives their bytes at the target. `epoch` is in each header, so
    that nothing from another epoch of the cluster is taken for this one's. Where the transport authenticates every
    byte, the checksum of a frame covers its header only: both ends know that from their own socket.
    """

    def __init__(
        self, sender: FrameQueue, receiver: ByteReceiver, source: int, target: int, epoch: int, deadline: float
    ) -> None:
        assert 0 <= epoch < 2**32
        self.source, self.target = source, target
        self.bytes_moved = 0
        self._epoch = epoch
        self._deadline = deadline
        self._sequence = 0
        self._prefixes: dict[tuple[tuple[int, ...], torch.dtype], bytes] = {}
        self._header = bytearray(frame.HEADER_SIZE)
        self._sender, self._receiver = sender, receiver
        self._closed = self._interrupted = False

    def send(self, tensor: torch.Tensor) -> None:
        if not frame.is_plain(tensor):
            tensor = tensor.detach().cpu().contiguous()
        places = frame.pieces_of(tensor.nbytes)
        self._write(self._prefix(tensor.shape, tensor.dtype), frame.memory_of(tensor), places)

    def send_bytes(self, payload: bytes) -> None:
        self._write(frame.bytes_prefix(len(payload), self._epoch), payload, [slice(0, len(payload))])

    def start_send(self, tensor: torch.Tensor) -> PendingSend | None:
        if tensor.nbytes <= JOINED_BYTES or not frame.is_plain(tensor):
            self.send(tensor)
            return None
        first, places = self._sequence, frame.pieces_of(tensor.nbytes)
        frames = self._frames(self._prefix(tensor.shape, tensor.dtype), frame.memory_of(tensor), first, places)
        self._count(tensor.nbytes, len(places))
        try:
            return self._sender.start_write(part for parts in frames for part in parts)
        except LinkError as error:
            raise self._fail(error) from error

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
        pending_sends: Sequence[PendingSend] = (),
    ) -> torch.Tensor:
        assert out is None or (out.shape == shape and out.dtype == dtype), "`out` is not what is to be received"
        prefix = self._prefix(shape, dtype)
        until = time.monotonic() + self._deadline
        self._read_header(prefix, until, pending_sends)
        plain = out is not None and frame.is_plain(out)
        tensor = out if out is not None and plain else torch.empty(shape, dtype=dtype)
        memory = memoryview(frame.memory_of(tensor))
        for place in frame.pieces_of(tensor.nbytes):
            if place.start:
                self._read_header(prefix, until, pending_sends)
            self._read_payload(memory[place], place.stop - place.start, until, self._head(prefix), pending_sends)
        return tensor if out is None or plain else out.copy_(tensor)

    def recv_bytes(self, limit: int) -> bytes:
        expected = f"up to {limit} bytes, epoch {self._epoch}, frame {self._sequence}"
        until = time.monotonic() + self._deadline
        self._read(self._header, frame.HEADER_SIZE, until, expected)
        length = self._declared(limit, expected)
        payload = bytearray(length)
        self._read_payload(payload, length, until, expected)
        return bytes(payload)

    def wait(self, seconds: float) -> bool:
        return self._receiver.wait(seconds)

    @property
    def is_over(self) -> bool:
        return self._closed or self._receiver.is_over

    def set_deadline(self, seconds: float) -> None:
        self._deadline = self._sender.deadline = seconds

    def unbounded(self) -> None:
        self._sender.depth = math.inf

    def interrupt(self) -> None:
        self._interrupted = True
        self._sender.interrupt()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._sender.close()
        finally:
            self._receiver.close()

    def _head(self, prefix: bytes) -> bytes:
        """A header's first 60 bytes: all but the checksum."""
        return prefix + frame.pack_sequence(self._sequence)

    def _count(self, size: int, frames: int = 1) -> None:
        self._sequence += frames
        self.bytes_moved += size

    def _frames(
        self, prefix: bytes, payload: frame.Memory | bytes, first: int, places: Sequence[slice]
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Header and payload of each frame; the checksum of one is computed when it is asked for."""
        memory = memoryview(payload)
        for sequence, place in enumerate(places, first):
            part = memory[place]
            yield frame.seal_header(prefix + frame.pack_sequence(sequence), self._covered(part)), part

    def _covered(self, payload: frame.Memory | bytes) -> frame.Memory | bytes:
        """What of a payload the frame's checksum covers."""
        return b"" if self._sender.authentic else payload

    def _read_header(self, prefix: bytes, until: float, pending_sends: Sequence[PendingSend]) -> None:
        expected = self._head(prefix)
        self._read(self._header, frame.HEADER_SIZE, until, expected, pending_sends)
        if not self._header.startswith(expected):
            raise self._fail(self._refused(_words(expected)))

    def _prefix(self, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
        known = self._prefixes.get((shape, dtype))
        if known is None:
            if len(self._prefixes) >= PREFIXES_KEPT:
                self._prefixes.clear()
            known = self._prefixes[shape, dtype] = frame.tensor_prefix(shape, dtype, self._epoch)
        return known

    def _write(self, prefix: bytes, payload: frame.Memory | bytes, places: Sequence[slice]) -> None:
        if len(places) == 1:
            whole = b"".join((frame.seal_header(self._head(prefix), self._covered(payload)), payload))
        else:
            whole = b"".join(part for parts in self._frames(prefix, payload, self._sequence, places) for part in parts)
        self._count(places[-1].stop, len(places))  # before: once it arrives, another thread of ours may send the next
        try:
            self._sender.write(whole)
        except LinkError as error:
            raise self._fail(error) from error

    def _declared(self, limit: int, expected: str) -> int:
        """The length that a frame of bytes declares, once all else in its header is found to be as it must."""
        try:
            header = frame.parse(self._header)
        except FrameError as error:
            raise self._fail(self._refused(expected)) from error
        if header.dtype is not None or header.length > limit:
            raise self._fail(self._refused(expected))
        if (header.epoch, header.sequence) != (self._epoch, self._sequence):
            raise self._fail(self._refused(expected))
        return header.length

    def _read_payload(
        self,
        memory: frame.Memory | bytearray,
        size: int,
        until: float,
        expected: Expected,
        pending_sends: Sequence[PendingSend] = (),
    ) -> None:
        if size:
            self._read(memory, size, until, expected, pending_sends)
        if not frame.is_sealed(self._header, b"" if self._receiver.authentic else memory):
            got = f"{frame.describe(self._header)} with a checksum that is not that of its bytes"
            raise self._fail(faults.refused_link(self.source, self.target, got, _words(expected)))
        self._count(size)

    def _read(
        self,
        memory: frame.Memory | bytearray,
        size: int,
        until: float,
        expected: Expected,
        pending_sends: Sequence[PendingSend] = (),
    ) -> None:
        if self._closed:
            raise faults.closed_here(self.source, self.target)
        try:
            self._receiver.read(memory, size, until, pending_sends)
        except TimeoutError as error:
            what = _words(expected)
            raise self._fail(faults.nothing_sent(self.source, self.target, self._deadline, what)) from error
        except OSError as error:
            if self._interrupted or self._closed:
                raise self._fail(faults.closed_here(self.source, self.target)) from error
            what = _words(expected)
            raise self._fail(faults.source_gone(self.source, self.target, what, str(error))) from error

    def _refused(self, expected: str) -> FrameError:
        return faults.refused_link(self.source, self.target, frame.describe(self._header), expected)

    def _fail(self, error: LinkError) -> LinkError:
        """Close this end for good; the caller raises the error that is returned."""
        self._closed = True
        self._sender.abandon()
        self._receiver.close()
        return error


def _words(expected: Expected) -> str:
    return expected if isinstance(expected, str) else frame.describe(expected)
