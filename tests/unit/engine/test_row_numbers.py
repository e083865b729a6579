"""Numbers that are kept from one batch to the next are those that each batch would have from nothing."""

from __future__ import annotations

import random

from tllm.devices.choose import CPU
from tllm.engine.row_numbers import HostNumbers, PackedNumbers
from tllm.engine.schedule.batch import Batch, BatchEntry

MOST, PAGES, PAGE_SIZE, SPARE = 6, 5, 4, 30


def random_batch(dice: random.Random, before: Batch | None) -> Batch:
    """Some sequences of the batch before a token later, some ended, some with other pages, some new."""
    entries = []
    for entry in before.entries if before else ():
        if entry.stop < PAGES * PAGE_SIZE and dice.random() < 0.8:
            grown = tuple((first, count) for first, count in entry.page_table)
            if entry.stop // PAGE_SIZE == sum(count for _, count in grown):
                grown = (*grown, (dice.randrange(SPARE), 1))
            entries.append(BatchEntry(entry.key, entry.stop, 1, 1, grown))
    for key in range(dice.randint(0 if entries else 1, MOST - len(entries))):
        pages, table = dice.randint(1, PAGES), list[tuple[int, int]]()
        while (held := sum(count for _, count in table)) < pages:
            table.append((dice.randrange(SPARE - PAGES), dice.randint(1, pages - held)))
        entries.append(
            BatchEntry(100 + key, dice.randrange((pages - 1) * PAGE_SIZE, pages * PAGE_SIZE), 1, 1, tuple(table))
        )
    return Batch(0, tuple(entries), tuple(dice.randrange(99) for _ in entries))


def assert_written(numbers: HostNumbers, batch: Batch, size: int) -> None:
    rows = numbers.rows
    spare = BatchEntry(0, 0, 1, 1, ((SPARE, 1),))
    padded = [*zip(batch.entries, batch.token_ids, strict=True)] + [(spare, 0)] * (size - len(batch.entries))
    for row, (entry, token) in enumerate(padded):
        pages = [first + i for first, count in entry.page_table for i in range(count)]
        assert rows.ids[row] == token and rows.positions[row] == entry.start
        assert rows.tiles[row].tolist() == [row, 1, entry.start, row]
        assert rows.tables[row, : len(pages)].tolist() == pages
        assert rows.places[row] == pages[entry.start // PAGE_SIZE] * PAGE_SIZE + entry.start % PAGE_SIZE


def test_batch_after_batch() -> None:
    dice, numbers = random.Random(3), HostNumbers(MOST, PAGES, PAGE_SIZE, SPARE)
    batch: Batch | None = None
    for _ in range(300):
        batch = random_batch(dice, batch)
        size = dice.randint(len(batch.entries), MOST)
        numbers.write(batch, size)
        assert_written(numbers, batch, size)


def test_one_copy_brings_all_that_a_batch_needs() -> None:
    """The memory up to the tables of its rows; numbers of other rows stay what they were."""
    dice, numbers = random.Random(4), HostNumbers(MOST, PAGES, PAGE_SIZE, SPARE)
    there = PackedNumbers(MOST, PAGES, CPU)
    batch = random_batch(dice, None)
    numbers.write(batch, MOST)
    for size in (len(batch.entries), MOST):
        there.of_rows(size).copy_(numbers.of_rows(size))
        for ours, theirs in zip(numbers.rows, there.rows, strict=True):
            assert (ours[:size] == theirs[:size].numpy()).all()
    assert all(x.data_ptr() % 16 == 0 for x in there.rows), "kernels read four numbers at once"


def test_rows_of_the_batch_before_are_written_beside() -> None:
    dice, numbers = random.Random(5), HostNumbers(MOST, PAGES, PAGE_SIZE, SPARE)
    batch = Batch(0, tuple(BatchEntry(key, 0, 1, 1, ((key, 1),)) for key in range(3)), (0, 0, 0))
    sources = tuple(dice.sample(range(MOST), 3))
    numbers.write(batch, MOST, sources)
    assert tuple(numbers.rows.sources[:3].tolist()) == sources
