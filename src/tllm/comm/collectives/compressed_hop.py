"""`CompressedHop`: activations from one pipeline stage to the next in a compressed format.

`decide_compression` measures whether that saves time on a link. Each row is encoded by itself, so that the numbers it
becomes do not depend on the rows that travel with it, and therefore not on which requests are computed together.
Compression changes numbers: `error` says by how much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from tllm.cluster.settings import Narrowing
from tllm.comm.collectives.compressed_activations import ActivationFormat, Bf16Activations, Int8Activations
from tllm.comm.links.link import Link

FORMATS: dict[str, ActivationFormat] = {"bf16": Bf16Activations(), "int8": Int8Activations()}
SAMPLED_ROWS = 16  # of each message, from which the error is estimated: a bounded cost
AHEAD_BYTES, TIMED_BYTES = 256 * 1024, 512 * 1024
YES, NO = b"\1", b"\0"


class CompressedHop:
    """One end of a link on which rows travel in a format of `FORMATS`; both ends have one.

    `form` is the format's name.
    """

    def __init__(self, link: Link, form: str) -> None:
        self.link, self.form = link, form
        self._squared_error = self._squared_sum = 0.0

    @property
    def error(self) -> float:
        """Root mean square of what rounding changed in the rows sent, relative to that of the rows; 0 before any."""
        return math.sqrt(self._squared_error / self._squared_sum) if self._squared_sum else 0.0

    def send(self, x_TD: Tensor) -> None:
        """Send rows; they may be overwritten afterwards."""
        self.link.send(_pack(x_TD, self.form))
        sample = x_TD[:SAMPLED_ROWS]
        decoded = _unpack(_pack(sample, self.form), tuple(sample.shape), sample.dtype, self.form)
        self._squared_error += float((sample.float() - decoded.float()).square().sum())
        self._squared_sum += float(sample.float().square().sum())

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receive rows of this shape and dtype."""
        message = self.link.recv((FORMATS[self.form].nbytes(shape[0] * _width(shape[1], self.form)),), torch.uint8)
        return _unpack(message, shape, dtype, self.form)


def format_for(asked: Narrowing, dtype: torch.dtype) -> str:
    """The name of the format for rows of this dtype: what was asked for, or with `auto` the one of least error.

    "" for none: it is off, or would be no shorter than the rows are.
    """
    form = ("bf16" if dtype.itemsize > 2 else "int8") if asked == "auto" else asked
    return "" if form == "off" or (form == "bf16" and dtype.itemsize <= 2) else form


def expected_error(form: str, dtype: torch.dtype, width: int) -> float:
    """The relative error of the format on rows of normal numbers: what to expect before anything was sent."""
    x_TD = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    decoded = _unpack(_pack(x_TD, form), (64, width), dtype, form)
    return float((x_TD.float() - decoded.float()).norm() / x_TD.float().norm())


def decide_compression(
    previous: Link, following: Link, stages: int, rows: int, width: int, dtype: torch.dtype
) -> tuple[bool, bool, float]:
    """Whether compression pays on the link from the previous stage and on that to the next; and the former's bytes/s.

    It pays where encoding and decoding a message of `rows` takes less time here than the link, at the rate that was
    measured, takes for the bytes that are saved. The receiver decides, and the sender learns it by messages around the
    ring. Every stage of the ring calls this.
    """
    _pass_round(previous, following, stages, NO)  # all have begun
    rate = _rate(previous, following)
    form = format_for("auto", dtype)
    x_TD = torch.zeros(rows, width, dtype=dtype)
    saved = x_TD.nbytes - FORMATS[form].nbytes(rows * _width(width, form))
    pays = saved / rate > _seconds(lambda: _unpack(_pack(x_TD, form), (rows, width), dtype, form))
    of_next_stage = _pass_round(previous, following, stages, YES if pays else NO)
    return pays, of_next_stage == YES, rate


def _rate(previous: Link, following: Link) -> float:
    """Bytes/s from the previous stage, while each stage sends to the next; some bytes go ahead to fill the link."""
    ahead, timed = (torch.zeros(count, dtype=torch.uint8) for count in (AHEAD_BYTES, TIMED_BYTES))
    following.send(ahead)
    following.send(timed)
    previous.recv(tuple(ahead.shape), torch.uint8, ahead)
    start = time.perf_counter()
    previous.recv(tuple(timed.shape), torch.uint8, timed)
    return TIMED_BYTES / (time.perf_counter() - start)


def _pass_round(previous: Link, following: Link, stages: int, mine: bytes) -> bytes:
    """The next stage's `mine`: links lead one way, so it reaches this stage through all others of the ring."""
    passed_on = mine
    for _ in range(stages - 1):
        following.send_bytes(passed_on)
        passed_on = previous.recv_bytes(len(mine))
    return passed_on


def _seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return median(once() for _ in range(3))


def _width(width: int, form: str) -> int:
    """Numbers of a row as it travels: padded to whole blocks of the format, so that no two rows share a block."""
    return width + -width % FORMATS[form].block


def _pack(x_TD: Tensor, form: str) -> Tensor:
    width = x_TD.shape[1]
    return FORMATS[form].pack(F.pad(x_TD.detach(), (0, _width(width, form) - width)).flatten())


def _unpack(message: Tensor, shape: tuple[int, ...], dtype: torch.dtype, form: str) -> Tensor:
    rows, width = shape
    padded = _width(width, form)
    return FORMATS[form].unpack(message, rows * padded).view(rows, padded)[:, :width].to(dtype).contiguous()
