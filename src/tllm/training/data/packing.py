"""Packs documents into rows of at most `seq_len` tokens, end to end, and deals the rows of a batch to ranks.

Both see the global order only. The number of ranks changes which rank takes a row, never what is in the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tllm.core.errors import PlanError
from tllm.training.data.encoder import IGNORED, Document, Values

OPEN_ROWS = 32
"""Rows that wait for a document of the right length; more of them waste fewer places and make a larger state."""


SHARE_ROWS = 64
"""So many rows tell which part of packed ones has tokens."""

ArrayType = Literal["<f4", "<f8", "<i2", "<i4", "<i8"]
"""Of numbers of rows that travel, in numpy's letters; bfloat16 goes as the 2 bytes that it is."""


class RowPiece(NamedTuple):
    """Tokens [start, stop) of the row with this global number."""

    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


Packed = tuple[RowPiece, ...]
"""What one row of a batch holds, in order; its pieces do not see each other."""


class Packer:
    """Best fit: a piece goes where it leaves the least room; the fullest row leaves when too many are open.

    With `open_rows=0` each piece is a row of its own: no packing.
    """

    def __init__(self, seq_len: int, open_rows: int = OPEN_ROWS) -> None:
        self.seq_len = seq_len
        self.open_rows = open_rows
        self._open: list[list[RowPiece]] = []
        self._rooms: list[int] = []

    def place(self, piece: RowPiece) -> Packed | None:
        """Take a piece; the row that is ready because of it, if any."""
        assert 0 < piece.length <= self.seq_len
        fits = [(room, index) for index, room in enumerate(self._rooms) if room >= piece.length]
        index = min(fits)[1] if fits else len(self._open)
        if not fits:
            self._open.append([])
            self._rooms.append(self.seq_len)
        self._open[index].append(piece)
        self._rooms[index] -= piece.length
        if self._rooms[index] == 0:
            return self._leave(index)
        return self._leave(self._rooms.index(min(self._rooms))) if len(self._open) > self.open_rows else None

    def close(self) -> Packed | None:
        """The oldest open row as it is, for the end of the data; None when nothing is open."""
        return self._leave(0) if self._open else None

    def state(self) -> list[list[list[int]]]:
        """The open rows as lists of [row, start, stop]."""
        return [[list(piece) for piece in row] for row in self._open]

    def restore(self, state: Sequence[Sequence[Sequence[int]]]) -> None:
        self._open = [[RowPiece(*piece) for piece in row] for row in state]
        self._rooms = [self.seq_len - sum(piece.length for piece in row) for row in self._open]
        assert min(self._rooms, default=1) > 0

    def _leave(self, index: int) -> Packed:
        self._rooms.pop(index)
        return tuple(self._open.pop(index))


class RowLengths(NamedTuple):
    """Tokens of a prompt, and of a reply to it, on an average; `parts`: prompts with a reply that stay together, such
    as a pair's two. Of a text from whose beginning a model learns the prompt is the first token. `fill`: the part of a
    packed row's places that have a token. `document`: tokens of a document, of which several rows may have pieces."""

    prompt: float
    reply: float
    parts: int = 1
    fill: float = 1.0
    document: float = 0.0

    @classmethod
    def of(cls, documents: Iterable[Document], longest: int, splits: bool = False) -> RowLengths | None:
        """Of some documents, of which a part has `longest` tokens at most: others are cut to pieces, each of them
        counted, where the job `splits` them, and else cut off. A prompt ends with the token that predicts the first of
        a reply, and a reply with the last that is predicted. None where no document has a token."""
        prompts, replies, pieces, whole, parts = list[int](), list[int](), list[int](), list[int](), 1
        for document in documents:
            parts = max(1, len(document.parts))
            length = len(document.targets)
            stops = list(accumulate(document.parts)) or [length]
            if splits and not document.parts:
                stops = [*range(longest, length, longest), length]
            spans = [(start, stop) for start, stop in pairwise((0, *stops)) if start < stop]
            for targets in (document.targets[start:stop] for start, stop in spans):
                (places,) = np.nonzero(targets != IGNORED)
                first, last = (int(places[0]), int(places[-1])) if len(places) else (len(targets) - 1, len(targets) - 2)
                prompts.append(min(first + 1, longest))
                replies.append(min(last - first + 1, longest - prompts[-1]))
            sizes = [length] if document.parts else [stop - start for start, stop in spans]
            pieces += (min(size, longest) for size in sizes if size)
            whole.append(length if splits else min(length, longest))
        if not prompts:
            return None
        return cls(fmean(prompts), fmean(replies), parts, packed_share(pieces, longest), fmean(whole))

    def of_row(self, tokens: int, packed: bool) -> float:
        """Tokens of a row of at most so many."""
        return self.fill * tokens if packed else self.parts * (self.prompt + self.reply)

    def rows(self, documents: int, tokens: int, packed: bool) -> int:
        """How many rows of at most so many tokens these documents fill."""
        return math.ceil(round(documents * self.document / self.of_row(tokens, packed), 3))

    def filling(self, tokens: int, packed: bool) -> tuple[int, int, int]:
        """(documents, tokens of a prompt, tokens of a reply) in a row of at most so many tokens: if they are `packed`
        as many as have room, which fill their share of it in the proportion of prompt and reply that they have, else
        one as it is."""
        room, whole = self.of_row(tokens, packed), self.parts * (self.prompt + self.reply)
        count = max(1, round(room / whole)) if packed else 1
        each = min(tokens // (self.parts * count), round(room / (self.parts * count)))
        reply = min(max(1, round(each * self.reply / (self.prompt + self.reply))), max(1, each - 1))
        return count, max(1, each - reply), reply


def packed_share(lengths: Sequence[int], seq_len: int) -> float:
    """The part of the places of packed rows that have a token, where documents of these lengths come again and again
    until they have filled some rows."""
    packer, total = Packer(seq_len), sum(lengths)
    rounds = math.ceil(SHARE_ROWS * seq_len / total)
    rows = sum(packer.place(RowPiece(0, 0, length)) is not None for _ in range(rounds) for length in lengths)
    while packer.close():
        rows += 1
    return rounds * total / (rows * seq_len)


def deal(count: int, shares: Sequence[int]) -> list[range]:
    """Which of `count` rows each rank takes, in proportion to its share; neighbours stay together.

    A rank may get none where there are fewer rows than the shares ask for.
    """
    if not shares or min(shares) < 1:
        raise PlanError(f"rows cannot be dealt by shares {tuple(shares)}", "give each rank a share of 1 or more")
    bounds = [count * taken // sum(shares) for taken in (0, *accumulate(shares))]
    return [range(start, stop) for start, stop in pairwise(bounds)]


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A row without padding. Its documents do not see each other: attention goes by `lengths`, the tokens of each.

    `labels[i]` is the token to predict at place i (moved by one already) or -100. `positions` begin at 0 in each
    document, and in each piece of a split one. `pieces` say where they came from: (row number, start, stop).
    `place` is the row's number in the global batch, for `seed_for(seed, step, place)`. `of_documents` and `of_tokens`
    are numbers of each document and of each token, by name. `weight` is the row's part of the step's denominator.
    """

    place: int
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: tuple[int, ...]
    pieces: Packed
    of_documents: Values = field(default_factory=dict)
    of_tokens: Values = field(default_factory=dict)
    given_weight: float | None = None

    @property
    def weight(self) -> float:
        """What the row adds to the denominator of the step's loss: the tokens that it predicts, unless it was given."""
        return float((self.labels != IGNORED).sum()) if self.given_weight is None else self.given_weight

    @property
    def row_numbers(self) -> tuple[int, ...]:
        """The rows of the data that it holds something of."""
        return tuple(piece.row for piece in self.pieces)


def put_together(place: int, pieces: Packed, document: Callable[[int], Document]) -> PackedRow:
    """The row of these pieces, in their order."""
    parts = [(document(piece.row), piece) for piece in pieces]
    lengths = tuple(length for whole, piece in parts for length in (whole.parts or (piece.length,)))
    weights = [whole.weight for whole, _ in parts if whole.weight is not None]
    assert len(weights) in (0, len(parts)), "rows of one kind stand together"
    return PackedRow(
        place,
        np.concatenate([whole.ids[piece.start : piece.stop] for whole, piece in parts]).astype(np.int64),
        np.concatenate([whole.targets[piece.start : piece.stop] for whole, piece in parts]).astype(np.int64),
        np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        lengths,
        pieces,
        {name: np.concatenate([whole.values[name] for whole, _ in parts]) for name in parts[0][0].values},
        given_weight=sum(weights) if weights else None,
    )
