"""Context parallel: which tokens of a microbatch each cp rank has, and which keys its queries see, as plain numbers.

A microbatch is cut into 2 n pieces and rank r has pieces r and 2 n - 1 - r: a token far back sees many keys and one
far ahead few, so that each rank has about the same work (Megatron-LM; Striped Attention, 2311.09431, deals by tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tllm.training.data.batch_tensors import Span, Tokens, picked

ROWS_AT_ONCE, KEYS_AT_ONCE = 128, 512
"""Queries and keys whose scores are in memory together."""


def zigzag(tokens: int, ranks: int) -> list[tuple[Span, ...]]:
    """The spans of a microbatch that each rank has, in order: as even as can be, and perhaps none."""
    pieces = list(pairwise(tokens * i // (2 * ranks) for i in range(2 * ranks + 1)))
    return [tuple((a, b) for a, b in (pieces[r], pieces[-1 - r]) if a < b) for r in range(ranks)]


def cut_tokens(tokens: Tokens, rank: int, ranks: int) -> Tokens:
    """What one of the cp ranks has of a whole microbatch."""
    assert tokens.spans is None, "a microbatch is cut once"
    if ranks == 1:
        return tokens
    spans = zigzag(len(tokens.ids_T), ranks)[rank]
    ids_T, labels_T, positions_T = (picked(x, spans) for x in (tokens.ids_T, tokens.labels_T, tokens.positions_T))
    of_tokens = {name: picked(x, spans) for name, x in tokens.of_tokens.items()}
    return replace(tokens, ids_T=ids_T, labels_T=labels_T, positions_T=positions_T, spans=spans, of_tokens=of_tokens)


class Tile(NamedTuple):
    """Queries and keys that meet, as ranges of those at hand; the places of the first of each in the microbatch.

    `masked`: not every query sees every key.
    """

    rows: slice
    keys: slice
    row_place: int
    key_place: int
    masked: bool


class VisibleKeys:
    """Which keys a query sees: those of its document from `window` - 1 places back to itself, so always a run."""

    def __init__(self, lengths: Sequence[int], window: int | None, device: torch.device | str = "cpu") -> None:
        of_each = torch.tensor(lengths, dtype=torch.int64, device=device)
        self.low_T = torch.repeat_interleave(of_each.cumsum(0) - of_each, of_each)
        if window is not None:
            place_T = torch.arange(len(self.low_T), device=device)
            self.low_T = torch.maximum(self.low_T, place_T - window + 1)
        self.low: list[int] = self.low_T.tolist()

    def seen(self, queries: Sequence[Span], keys: Sequence[Span]) -> list[Span]:
        """What of another rank's keys these queries see. No span of one lies across one of the other.

        A key is seen by what follows it, so of each span it is the end.
        """
        ends = []
        for start, stop in keys:
            low = min((self.low[first] for first, _ in queries if first >= stop), default=stop)
            if low < stop:
                ends.append((max(start, low), stop))
        return ends

    def tiles(self, queries: Sequence[Span], keys: Sequence[Span]) -> list[Tile]:
        """What there is to compute where these queries meet these keys."""
        return list(self._tiles(queries, keys))

    def mask(self, tile: Tile) -> Tensor:
        """Which of the tile's keys each of its queries sees."""
        row, rows = tile.row_place, tile.rows.stop - tile.rows.start
        place_R1 = torch.arange(row, row + rows, device=self.low_T.device)[:, None]
        key = tile.key_place
        place_S = torch.arange(key, key + tile.keys.stop - tile.keys.start, device=self.low_T.device)
        return (place_S <= place_R1) & (place_S >= self.low_T[row : row + rows, None])

    def _tiles(self, queries: Sequence[Span], keys: Sequence[Span]) -> Iterator[Tile]:
        for row_start, row_stop, row in _rows(queries):
            last = row_stop - 1
            for start, stop, at in located(keys):
                first, end = max(start, self.low[row_start]), min(stop, row_stop)
                for low in range(first, end, KEYS_AT_ONCE):
                    high = min(low + KEYS_AT_ONCE, end)
                    masked = low < self.low[last] or high - 1 > row_start
                    rows, here = slice(row, row + row_stop - row_start), slice(at + low - start, at + high - start)
                    yield Tile(rows, here, row_start, low, masked)


def _rows(queries: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Queries [start, stop) that are taken together, and where they stand among those at hand."""
    for start, stop, at in located(queries):
        for low in range(start, stop, ROWS_AT_ONCE):
            yield low, min(low + ROWS_AT_ONCE, stop), at + low - start


def located(spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Each span and where it begins when they are put end to end."""
    at = 0
    for start, stop in spans:
        yield start, stop, at
        at += stop - start
