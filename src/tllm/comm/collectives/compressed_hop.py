"""`CompressedHop`: rows of activations over one link in a narrow form, and whether that pays on it (`agree`).

Each row is written by itself: what it becomes does not depend on the rows that travel beside it, and so neither on what
else is computed. Numbers change all the same: `error` says by how much.
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
from tllm.comm.collectives.compressed_activations import BLOCK, ActivationFormat, Bf16Activations, Int8Activations
from tllm.comm.links.link import Link

FORMS: dict[str, ActivationFormat] = {"bf16": Bf16Activations(), "int8": Int8Activations()}
SAMPLED_ROWS = 16  # of each message, by which the error is told: a bounded cost
AHEAD_BYTES, TIMED_BYTES = 256 * 1024, 512 * 1024
YES, NO = b"\1", b"\0"


class CompressedHop:
    """One end of a link by which rows travel as a form of `FORMS`; both ends have one."""

    def __init__(self, link: Link, form: str) -> None:
        self.link, self.form = link, form
        self._changed = self._whole = 0.0

    @property
    def error(self) -> float:
        """Root mean square of what rounding changed of the rows sent, relative to theirs; 0 before any."""
        return math.sqrt(self._changed / self._whole) if self._whole else 0.0

    def send(self, x_TD: Tensor) -> None:
        """Send rows; they may be overwritten afterwards."""
        self.link.send(_pack(x_TD, self.form))
        some = x_TD[:SAMPLED_ROWS]
        said = _unpack(_pack(some, self.form), tuple(some.shape), some.dtype, self.form)
        self._changed += float((some.float() - said.float()).square().sum())
        self._whole += float(some.float().square().sum())

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receive rows of this shape and dtype."""
        message = self.link.recv((FORMS[self.form].nbytes(shape[0] * _width(shape[1], self.form)),), torch.uint8)
        return _unpack(message, shape, dtype, self.form)


def form_for(asked: Narrowing, dtype: torch.dtype) -> str:
    """The form that rows of this dtype take if they take any: what was asked for, by `auto` that of least error.

    "" where it would be no shorter than they are.
    """
    form = ("bf16" if dtype.itemsize > 2 else "int8") if asked == "auto" else asked
    return "" if form == "off" or (form == "bf16" and dtype.itemsize <= 2) else form


def usual_error(form: str, dtype: torch.dtype, width: int) -> float:
    """How far off the form is on rows of normal numbers: what to expect before anything was sent."""
    x_TD = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    said = _unpack(_pack(x_TD, form), (64, width), dtype, form)
    return float((x_TD.float() - said.float()).norm() / x_TD.float().norm())


def agree(
    previous: Link, following: Link, stages: int, rows: int, width: int, dtype: torch.dtype
) -> tuple[bool, bool, float]:
    """Whether the form of `auto` pays from the stage before and to the next, and the bytes/s from the one before.

    It pays where the wire, as it measured, takes longer with what a message of `rows` has more than writing it narrow
    and reading it takes here. The receiver decides and tells the sender. Every stage of the ring calls this.
    """
    _pass_round(previous, following, stages, NO)  # all have begun
    rate = _rate(previous, following)
    form = form_for("auto", dtype)
    x_TD = torch.zeros(rows, width, dtype=dtype)
    spared = x_TD.nbytes - FORMS[form].nbytes(rows * _width(width, form))
    pays = spared / rate > _seconds(lambda: _unpack(_pack(x_TD, form), (rows, width), dtype, form))
    told = _pass_round(previous, following, stages, YES if pays else NO)
    return pays, told == YES, rate


def _rate(previous: Link, following: Link) -> float:
    """Bytes/s from the stage before, while each stage sends to the next; some bytes go ahead to fill the wire."""
    ahead, timed = (torch.zeros(count, dtype=torch.uint8) for count in (AHEAD_BYTES, TIMED_BYTES))
    following.send(ahead)
    following.send(timed)
    previous.recv(tuple(ahead.shape), torch.uint8, ahead)
    start = time.perf_counter()
    previous.recv(tuple(timed.shape), torch.uint8, timed)
    return TIMED_BYTES / (time.perf_counter() - start)


def _pass_round(previous: Link, following: Link, stages: int, mine: bytes) -> bytes:
    """What the next stage has to say, which reaches this one by way of all others."""
    said = mine
    for _ in range(stages - 1):
        following.send_bytes(said)
        said = previous.recv_bytes(len(mine))
    return said


def _seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return median(once() for _ in range(3))


def _width(width: int, form: str) -> int:
    """Numbers of a row as it travels: whole blocks of the form, so that no two rows share one."""
    return width + -width % BLOCK if form == "int8" else width


def _pack(x_TD: Tensor, form: str) -> Tensor:
    width = x_TD.shape[1]
    return FORMS[form].pack(F.pad(x_TD.detach(), (0, _width(width, form) - width)).flatten())


def _unpack(message: Tensor, shape: tuple[int, ...], dtype: torch.dtype, form: str) -> Tensor:
    rows, width = shape
    wide = _width(width, form)
    return FORMS[form].unpack(message, rows * wide).view(rows, wide)[:, :width].to(dtype).contiguous()
