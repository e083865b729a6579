"""One row of a batch: the pieces of its documents put end to end, as numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tllm.train.encode import Document
from tllm.train.packing import Packed


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A row without padding. Its documents do not see each other: attention goes by `lengths`, the tokens of each.

    `labels[i]` is the token to predict at place i (moved by one already) or -100. `positions` begin at 0 in each
    document, and in each piece of a split one. `pieces` say where they came from: (row number, start, stop).
    `place` is the row's number in the global batch, for `seed_for(seed, step, place)`.
    """

    place: int
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: tuple[int, ...]
    pieces: Packed

    @property
    def row_numbers(self) -> tuple[int, ...]:
        """The rows of the data that it holds something of."""
        return tuple(piece.row for piece in self.pieces)


def put_together(place: int, pieces: Packed, document: Callable[[int], Document]) -> PackedRow:
    """The row of these pieces, in their order."""
    parts = [(document(piece.row), piece) for piece in pieces]
    return PackedRow(
        place,
        np.concatenate([whole.ids[piece.start : piece.stop] for whole, piece in parts]).astype(np.int64),
        np.concatenate([whole.targets[piece.start : piece.stop] for whole, piece in parts]).astype(np.int64),
        np.concatenate([np.arange(piece.length, dtype=np.int64) for piece in pieces]),
        tuple(piece.length for piece in pieces),
        pieces,
    )
