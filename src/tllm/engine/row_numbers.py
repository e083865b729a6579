"""What tells a recorded step of each of its rows: numbers that lie together, so that one copy brings them to a device.

They are kept from one batch to the next. What changes with every token is written for all rows at once, a row's page
table only where it is another than the row had before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tllm.devices.choose import CPU
from tllm.engine.pages.page_table import Run
from tllm.engine.schedule.batch import Batch

COLUMNS = 8
"""Numbers of a row beside its page table: three, the row before, and four of its tile."""

Numbers = TypeVar("Numbers")


class RowNumbers(NamedTuple, Generic[Numbers]):
    """Of each row, on the host or the device: int32 [most rows, ...].

    `ids` and `positions` of tokens, the `places` of their keys, `sources`: the rows that their sequences had in the
    batch before; their `tiles` (each row is one, of its own sequence), and the pages of their sequences, `tables`.
    """

    ids: Numbers
    positions: Numbers
    places: Numbers
    sources: Numbers
    tiles: Numbers
    tables: Numbers


class PackedNumbers:
    """Room for the numbers of up to `most` rows of `pages` pages each, in one piece of memory that begins with all but
    the tables. On the host it is memory that a device reads by itself."""

    def __init__(self, most: int, pages: int, device: torch.device) -> None:
        room = -(-most // 4) * 4  # where each kind of numbers begins, the address is one of 16 bytes
        pinned = device == CPU and torch.cuda.is_available()
        self._pages, self._first_table = pages, COLUMNS * room
        self.memory = torch.zeros(room * (COLUMNS + pages), dtype=torch.int32, device=device, pin_memory=pinned)
        ids, positions, places, sources = (self.memory[at * room :][:most] for at in range(4))
        tiles, tables = self.memory[4 * room : COLUMNS * room], self.memory[COLUMNS * room :]
        self.rows = RowNumbers(ids, positions, places, sources, tiles.view(-1, 4)[:most], tables.view(-1, pages)[:most])

    def of_rows(self, rows: int) -> Tensor:
        """The memory up to the tables of the first rows."""
        return self.memory[: self._first_table + rows * self._pages]


class HostNumbers:
    """The numbers of a batch as the host writes them; rows that only fill a batch up are a sequence of one token in the
    page `spare`."""

    def __init__(self, most: int, pages: int, page_size: int, spare: int) -> None:
        self._packed, self._page_size, self._spare = PackedNumbers(most, pages, CPU), page_size, spare
        # The same memory, quicker to write to.
        self.rows: RowNumbers[np.ndarray[Any, Any]] = RowNumbers(*(x.numpy() for x in self._packed.rows))
        self._held = list[tuple[Run, ...]](((spare, 1),) for _ in range(most))  # what is written of page tables
        self._all = np.arange(most)
        self.rows.tiles[:, 0] = self.rows.tiles[:, 3] = self._all
        self.rows.tiles[:, 1] = 1
        self.rows.tables[:, 0] = spare
        self._fill_up(0, most)

    def of_rows(self, rows: int) -> Tensor:
        """The memory up to the tables of the first rows."""
        return self._packed.of_rows(rows)

    def write(self, batch: Batch, size: int, sources: Sequence[int] = ()) -> None:
        """Let the first rows be a batch's, and the others up to `size` fill it up."""
        numbers, entries, rows = self.rows, batch.entries, len(batch.entries)
        starts = np.array([entry.start for entry in entries], dtype=np.int32)
        numbers.ids[:rows], numbers.sources[: len(sources)] = batch.token_ids, sources
        numbers.positions[:rows] = numbers.tiles[:rows, 2] = starts
        held = self._held
        for row, entry in enumerate(entries):
            if held[row] != entry.page_table:
                self._write_table(row, entry.page_table)
        pages, beyond = np.divmod(starts, self._page_size)
        numbers.places[:rows] = numbers.tables[self._all[:rows], pages] * self._page_size + beyond
        self._fill_up(rows, size)

    def _write_table(self, row: int, runs: tuple[Run, ...]) -> None:
        self._held[row], table, at = runs, self.rows.tables[row], 0
        for first, count in runs:
            table[at : at + count] = range(first, first + count)
            at += count

    def _fill_up(self, rows: int, size: int) -> None:
        numbers = self.rows
        numbers.ids[rows:size] = numbers.positions[rows:size] = numbers.tiles[rows:size, 2] = 0
        numbers.places[rows:size] = self._spare * self._page_size
        for row in range(rows, size):
            if self._held[row] != ((self._spare, 1),):
                self._write_table(row, ((self._spare, 1),))
