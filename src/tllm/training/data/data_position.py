"""How much of the global order has been read, in row numbers, which any number of ranks can go on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tllm.core.errors import ConfigError
from tllm.training.data.packing import Packed, Packer, RowPiece
from tllm.training.data.row_order import RowOrder

EMPTY_IN_A_ROW = 1 << 16
"""So many rows without a token, beyond a whole epoch of them, end the run rather than let it search for ever."""


class LedgerPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`position`: the next place in the global order. `inside`: tokens already taken of the row that stands there.

    `open` are pieces read and not yet in a batch, row by row as [row, start, stop].
    """

    position: int
    inside: int
    open: list[list[tuple[int, int, int]]]


class RowLedger:
    """Takes packed rows off the global order, each row of the data exactly once an epoch.

    `length` gives the tokens of a row (0: nothing to learn from, passed over); a longer row than `packer.seq_len` is
    taken in several pieces. `end` is the position to stop at; None goes on for ever.
    """

    def __init__(self, order: RowOrder, length: Callable[[int], int], packer: Packer, end: int | None = None) -> None:
        self._order, self._length, self._packer, self._end = order, length, packer, end
        self._position = 0
        self._inside = 0

    @property
    def epoch(self) -> int:
        """How often as many rows as there are have been read."""
        return self._position // self._order.rows

    def take(self, count: int) -> list[Packed]:
        """The next `count` packed rows; fewer at the end of the data, then none."""
        taken: list[Packed] = []
        misses = 0
        while len(taken) < count:
            if self._end is not None and self._position >= self._end:
                closed = self._packer.close()
                if closed is None:
                    break
                taken.append(closed)
                continue
            piece = self._next()
            misses = 0 if piece else misses + 1
            if misses > self._order.rows + EMPTY_IN_A_ROW:
                raise ConfigError(f"the last {misses} rows read hold no token", "give files with text in them")
            packed = self._packer.place(piece) if piece else None
            if packed is not None:
                taken.append(packed)
        return taken

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here, as JSON holds it."""
        return {"position": self._position, "inside": self._inside, "open": self._packer.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state; `ConfigError` where it is none."""
        try:
            read = msgspec.convert(state, LedgerPosition)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the position in the data is not one: {error}", "resume from another save") from error
        self._position, self._inside = read.position, read.inside
        self._packer.restore(read.open)

    def waiting(self) -> list[RowPiece]:
        """Pieces that have been read and stand in no batch yet."""
        return [RowPiece(*piece) for row in self._packer.state() for piece in row]

    def _next(self) -> RowPiece | None:
        """The next piece of the global order; None for a row without tokens."""
        row = self._order.row(self._position)
        start, length = self._inside, self._length(row)
        stop = min(length, start + self._packer.seq_len)
        if stop < length:
            self._inside = stop
        else:
            self._position, self._inside = self._position + 1, 0
        return RowPiece(row, start, stop) if stop > start else None
