"""`FramedLink`: a link between two processes, as frames that are numbered and checked, over any transport.

What moves the bytes is a `FrameQueue` at the source and a `ByteReceiver` at the target. `TcpLink` has those of a
socket; `TransportLink` has queues that a thread of another library empties and fills.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from tllm.comm.links import errors as faults
from tllm.comm.links import frame
from tllm.comm.links.send_buffer import FrameQueue, PendingSend
from tllm.core.errors import FrameError, LinkError
from tllm.core.timing import AwakeClock

SHAPES_KEPT = 256
"""Shapes and dtypes of tensors whose frames one link remembers."""

JOINED_BYTES = 16 * 1024
"""So many bytes of a payload are sent, and read, together with its header by way of a copy. That costs less than one
more call of the socket."""

Expected = bytes | str
"""The expected prefix and sequence number of a header, or a description in words for errors."""


class ByteReceiver(Protocol):
    """What the target's end reads bytes from; `tcp_link.ReceiveBuffer` says what each call means.

    `authentic`: the transport has checked each byte already, as TLS does. `clock`: by which it is to read in time.
    """

    authentic: bool
    clock: AwakeClock

    def read(self, memory: memoryview, least: int, until: float, pending_sends: Sequence[PendingSend] = ()) -> int: ...

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
        self._known: dict[tuple[tuple[int, ...], torch.dtype], frame.TensorFrames] = {}
        self._first = memoryview(bytearray(frame.HEADER_SIZE + JOINED_BYTES))  # the header that came last, and more
        self._sender, self._receiver = sender, receiver
        self._closed = self._interrupted = False

    def send(self, tensor: torch.Tensor) -> None:
        if not frame.is_plain(tensor):
            tensor = tensor.detach().cpu().contiguous()
        known = self._known.get((tensor.shape, tensor.dtype)) or self._learn(tensor.shape, tensor.dtype)
        self._write(known.prefix, known.memory.from_address(tensor.data_ptr()), known.places)

    def send_bytes(self, payload: bytes) -> None:
        self._write(frame.bytes_prefix(len(payload), self._epoch), payload, (slice(0, len(payload)),))

    def start_send(self, tensor: torch.Tensor) -> PendingSend | None:
        if tensor.nbytes <= JOINED_BYTES or not frame.is_plain(tensor):
            self.send(tensor)
            return None
        known = self._known.get((tensor.shape, tensor.dtype)) or self._learn(tensor.shape, tensor.dtype)
        memory = known.memory.from_address(tensor.data_ptr())
        frames = self._frames(known.prefix, memory, self._sequence, known.places)
        self._count(tensor.nbytes, len(known.places))
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
        prefix, places, memory = self._known.get((shape, dtype)) or self._learn(shape, dtype)
        until = self._receiver.clock() + self._deadline
        plain = out is not None and frame.is_plain(out)
        tensor = out if out is not None and plain else torch.empty(shape, dtype=dtype)
        payload = memoryview(memory.from_address(tensor.data_ptr())).cast("B")
        for place in places:
            self._read_frame(prefix, payload[place], until, pending_sends)
        return tensor if out is None or plain else out.copy_(tensor)

    def recv_bytes(self, limit: int) -> bytes:
        expected = f"up to {limit} bytes, epoch {self._epoch}, frame {self._sequence}"
        until = self._receiver.clock() + self._deadline
        self._read(self._first[: frame.HEADER_SIZE], frame.HEADER_SIZE, until, expected)
        length = self._declared(limit, expected)
        payload = bytearray(length)
        if length:
            self._read(memoryview(payload), length, until, expected)
        self._check_seal(payload, expected)
        self._count(length)
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
            covered = b"" if self._sender.authentic else part
            yield frame.seal_header(prefix + frame.pack_sequence(sequence), covered), part

    def _learn(self, shape: tuple[int, ...], dtype: torch.dtype) -> frame.TensorFrames:
        """The frames of tensors that this link has not carried before, or not lately."""
        if len(self._known) >= SHAPES_KEPT:
            self._known.clear()
        known = self._known[shape, dtype] = frame.tensor_frames(shape, dtype, self._epoch)
        return known

    def _write(self, prefix: bytes, payload: frame.Memory | bytes, places: Sequence[slice]) -> None:
        if len(places) == 1:
            covered = b"" if self._sender.authentic else payload
            whole = b"".join((frame.seal_header(prefix + frame.pack_sequence(self._sequence), covered), payload))
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
            header = frame.parse(self._first[: frame.HEADER_SIZE])
        except FrameError as error:
            raise self._fail(self._refused(expected)) from error
        is_bytes = header.dtype is None and header.length <= limit
        if not is_bytes or (header.epoch, header.sequence) != (self._epoch, self._sequence):
            raise self._fail(self._refused(expected))
        return header.length

    def _read_frame(
        self, prefix: bytes, payload: memoryview, until: float, pending_sends: Sequence[PendingSend]
    ) -> None:
        """Fill `payload` from the next frame. What comes with its header is copied, the rest is read to its place."""
        expected, size = prefix + frame.pack_sequence(self._sequence), len(payload)
        first = self._first[: frame.HEADER_SIZE + size]
        came = self._read(first, frame.HEADER_SIZE, until, expected, pending_sends) - frame.HEADER_SIZE
        if first[: frame.CRC_AT] != expected:
            raise self._fail(self._refused(_words(expected)))
        if came:
            payload[:came] = first[frame.HEADER_SIZE : frame.HEADER_SIZE + came]
        if came < size:
            self._read(payload[came:], size - came, until, expected, pending_sends)
        self._check_seal(payload, expected)
        self._sequence += 1
        self.bytes_moved += size

    def _check_seal(self, payload: memoryview | bytearray, expected: Expected) -> None:
        """FrameError unless the checksum of the header that came is right; it covers `payload`, except on TLS."""
        if not frame.is_sealed(self._first, b"" if self._receiver.authentic else payload):
            got = f"{self._described()} with a checksum that is not that of its bytes"
            raise self._fail(faults.refused_link(self.source, self.target, got, _words(expected)))

    def _read(
        self,
        memory: memoryview,
        least: int,
        until: float,
        expected: Expected,
        pending_sends: Sequence[PendingSend] = (),
    ) -> int:
        if self._closed:
            raise faults.closed_here(self.source, self.target)
        try:
            return self._receiver.read(memory, least, until, pending_sends)
        except TimeoutError as error:
            what = _words(expected)
            raise self._fail(faults.nothing_sent(self.source, self.target, self._deadline, what)) from error
        except OSError as error:
            if self._interrupted or self._closed:
                raise self._fail(faults.closed_here(self.source, self.target)) from error
            what = _words(expected)
            raise self._fail(faults.source_gone(self.source, self.target, what, str(error))) from error

    def _refused(self, expected: str) -> FrameError:
        return faults.refused_link(self.source, self.target, self._described(), expected)

    def _described(self) -> str:
        """The header that came last, in words."""
        return frame.describe(bytes(self._first[: frame.HEADER_SIZE]))

    def _fail(self, error: LinkError) -> LinkError:
        """Close this end for good; the caller raises the error that is returned."""
        self._closed = True
        self._sender.abandon()
        self._receiver.close()
        return error


def _words(expected: Expected) -> str:
    return expected if isinstance(expected, str) else frame.describe(expected)
