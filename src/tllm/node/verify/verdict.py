"""What a comparison says: equal, rounding, or a fault, and where the first one is. Pure, no torch."""

from __future__ import annotations

import math

import msgspec

from tllm.core.errors import counted

ROUNDING_64 = 1e-10
"""Relative: what float64 rounds in a deep model stays far below, and a wrong sum or shift is far above."""

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number."""

ROUNDINGS = 16
"""How many roundings of the dtype, for each square root of a layer, are taken as such. Where a model makes more of a
rounding float64 shows how much, and as many of that are."""


class Differs(msgspec.Struct, frozen=True):
    """A part of the model ("layer 3") that gives something else on a rank; its place counts from the embedding, 0."""

    rank: int
    what: str
    place: int
    largest: float
    relative: float


class Damaged(msgspec.Struct, frozen=True):
    """A piece of a tensor that a rank holds and that is not what the file holds."""

    rank: int
    layer: str
    name: str
    box: str


class Pass(msgspec.Struct, frozen=True):
    """One comparison in one dtype: what differs, in the model's order."""

    dtype: str
    differs: tuple[Differs, ...]
    damaged: tuple[Damaged, ...]

    @property
    def worst(self) -> float:
        return max((part.relative for part in self.differs), default=0.0)


class Verdict(msgspec.Struct, frozen=True):
    """`words` for people; `layer` and `parameter` name the first fault, "" where there is none."""

    equal: bool
    words: tuple[str, ...]
    layer: str = ""
    parameter: str = ""
    rank: int | None = None


def judge(first: Pass, exact: Pass | None, is_routed: bool = False) -> Verdict:
    """`exact` is the same comparison in float64, made where `first` differs and there is room for it. Where tokens are
    routed to experts, one rounding may send one elsewhere, so that a difference of any finite size may be rounding."""
    if first.damaged:
        return _damaged(first)
    if not first.differs:
        return Verdict(True, (f"equal: every layer gives the same bits in {first.dtype}, split and unsplit",))
    if exact is None:
        return _by_roundings(first)
    if exact.damaged:
        return _damaged(exact)
    far = [part for part in exact.differs if not part.relative <= ROUNDING_64]
    if far:
        return _wrong(far[0], exact.dtype)
    exactly = {(part.rank, part.what): part.relative for part in exact.differs}
    for part in first.differs:
        allowed = math.inf if is_routed else _rounded(part, first.dtype, exactly.get((part.rank, part.what), 0.0))
        if not math.isfinite(part.relative) or part.relative > allowed:
            return _wrong_in_dtype(part, first.dtype, exact.worst)
    return Verdict(
        True,
        (
            f"equal within rounding: in {first.dtype} nothing is off by more than {first.worst:.2g} of the largest",
            f"in float64 it is {exact.worst:.2g}, so sums in another order are all that differs",
        ),
    )


def _damaged(comparison: Pass) -> Verdict:
    """Name the first piece, and what the layer that it is in gives there."""
    piece = comparison.damaged[0]
    words = [
        f"not equal: rank {piece.rank} holds {piece.name}{piece.box} otherwise than the file",
        f"that is in {piece.layer}, and {counted(len(comparison.damaged), 'such piece')} in all",
    ]
    shown = [part for part in comparison.differs if (part.rank, part.what) == (piece.rank, piece.layer)]
    words += [
        f"{piece.layer} differs there by {part.relative:.2g} of its largest, in {comparison.dtype}" for part in shown
    ]
    return Verdict(False, tuple(words), piece.layer, piece.name, piece.rank)


def _wrong(first: Differs, dtype: str) -> Verdict:
    return Verdict(
        False,
        (
            f"not equal: {first.what} on rank {first.rank} differs by {first.relative:.2g} of its largest, in {dtype}",
            "every weight is as in the file: the fault is in how the model is cut, or in a processor or its memory",
        ),
        first.what,
        rank=first.rank,
    )


def _wrong_in_dtype(first: Differs, dtype: str, exactly: float) -> Verdict:
    return Verdict(
        False,
        (
            f"not equal: {first.what} on rank {first.rank} differs by {first.relative:.2g} of its largest, in {dtype}",
            f"every weight is as in the file and in float64 it is {exactly:.2g}, so this is more than rounding: "
            f"the fault is in what computes in {dtype}, or {dtype} cannot hold a number of this model",
        ),
        first.what,
        rank=first.rank,
    )


def _rounded(part: Differs, dtype: str, exactly: float = 0.0) -> float:
    """How far a part may be off by rounding: differences may grow by a few roundings for each layer that came before,
    or as they do in float64, where this part is off by `exactly`."""
    return ROUNDINGS * EPSILON[dtype] * max(math.sqrt(part.place + 1), exactly / EPSILON["float64"])


def _by_roundings(first: Pass) -> Verdict:
    """Without float64."""
    far = [part for part in first.differs if not part.relative <= _rounded(part, first.dtype)]
    if far:
        return _wrong(far[0], first.dtype)
    return Verdict(
        True,
        (
            f"equal within what {first.dtype} rounds: nothing is off by more than {first.worst:.2g} of the largest",
            "there was no memory to compare in float64, which would tell rounding from small faults",
        ),
    )
